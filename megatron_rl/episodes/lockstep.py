"""Plays many text environments in lock step with one batch engine and records what happened, token by token.

What every record looks like, however it was played: `episode`. For engines that take calls one by one: `concurrent`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from megatron_rl.engines import Generation, TokenEngine
from megatron_rl.environments.base import EpisodeSpec, TextEnvironment, close_environment
from megatron_rl.episodes.episode import CONTEXT_SETTING, Episode, EpisodeLimits
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import Trajectory

__all__ = ["Demonstration", "EpisodeSpec", "MakeEnvironment", "play_episodes", "random_play"]

MakeEnvironment = Callable[[EpisodeSpec], TextEnvironment]


@dataclass(frozen=True)
class Demonstration:
    """A played token sequence for supervised training."""

    tokens: np.ndarray
    """int32 [N]."""
    action_mask: np.ndarray
    """bool [N]: 1 on the tokens of actions."""
    success: bool
    """Whether the task was solved, by chance."""


def play_episodes(
    engine: TokenEngine,
    make_env: MakeEnvironment,
    specs: Sequence[EpisodeSpec],
    limits: EpisodeLimits,
    *,
    greedy: bool = False,
    concurrency: int = 128,
) -> list[Trajectory]:
    """Play all episodes, at most `concurrency` at a time; an ended one is replaced at once.

    Args:
        engine: called once per turn with the exact tokens of every episode in flight.
        make_env: builds the environment of one episode.
        specs: what to play.
        limits: what ends an episode early.
        greedy: see the engine; greedy trajectories are for evaluation only.
        concurrency: batch size of the engine.

    Returns:
        One trajectory for each spec, in the order of `specs`. An exception in an environment ends its episode with
        the outcome `environment_error` and what was recorded so far.

    Raises:
        ConfigError: `concurrency` is below 1, or a first observation leaves no room for an action.
        EngineAnswerError: the engine returned what cannot be recorded.
    """
    if concurrency < 1:
        raise ConfigError("no episode at a time", field="concurrency", found=concurrency, expected=">= 1")
    waiting = deque(enumerate(specs))
    active: dict[int, _ActiveEpisode] = {}
    finished: dict[int, Trajectory] = {}
    while waiting or active:
        while waiting and len(active) < concurrency:
            index, spec = waiting.popleft()
            active[index] = _ActiveEpisode(Episode(spec, limits, greedy), make_env)
        running = [one for one in active.values() if one.episode.running]
        for one, generation in _generate(engine, running, greedy):
            one.play(generation)
        over = {index: one for index, one in active.items() if not one.episode.running}
        finished |= {index: one.finish() for index, one in over.items()}
        active = {index: one for index, one in active.items() if index not in over}
    return [finished[index] for index in range(len(specs))]


def random_play(
    make_env: MakeEnvironment, specs: Sequence[EpisodeSpec], *, max_turns: int, context_limit: int, seed: int = 0
) -> list[Demonstration]:
    """Play uniformly random valid actions: supervised training on it teaches the format of actions, not which is good.

    Args:
        make_env, specs: as for `play_episodes`.
        max_turns: turns after which an episode ends.
        context_limit: an action that would exceed so many tokens is not played.
        seed: seed of the choice of actions.

    Returns:
        One demonstration for each spec, without the observation after its last action.
    """
    rng = np.random.default_rng(seed)
    return [_random_episode(make_env(spec), spec, rng, max_turns, context_limit) for spec in specs]


def _random_episode(
    env: TextEnvironment, spec: EpisodeSpec, rng: np.random.Generator, max_turns: int, context_limit: int
) -> Demonstration:
    tokens: list[int] = []
    mask: list[bool] = []
    success = False
    observation = env.reset(spec.seed, spec.options)
    for _ in range(max_turns):
        actions = env.valid_actions()
        action = actions[rng.integers(len(actions))]
        if len(tokens) + len(observation) + len(action) > context_limit:
            break
        tokens += [*observation, *action]
        mask += [False] * len(observation) + [True] * len(action)
        result = env.step(action)
        observation, success = result.observation, bool(result.info.get("success", False))
        if result.terminated or result.truncated:
            break
    return Demonstration(np.asarray(tokens, np.int32), np.asarray(mask, bool), success)


class _ActiveEpisode:
    """An episode in flight and its environment."""

    def __init__(self, episode: Episode, make_env: MakeEnvironment) -> None:
        self.episode = episode
        self._env: TextEnvironment | None = None
        spec = episode.spec
        try:
            self._env = make_env(spec)
            first = self._env.reset(spec.seed, spec.options)
        except Exception as error:  # whatever an environment raises ends its episode, not the run
            episode.fail(error)
            return
        episode.begin(first, self._env.stop_tokens)
        if episode.outcome == "truncated_length":
            raise ConfigError(
                "the first observation leaves no room for an action", field="tokens", found=len(first),
                expected=f"< {episode.limits.context_limit}", setting=CONTEXT_SETTING,
            )  # fmt: skip

    def play(self, generation: Generation) -> None:
        """Record one engine call and, if that completes an action, play it in the environment."""
        action = self.episode.record(generation)
        if action is None:
            return
        assert self._env is not None, "an episode without environment does not run"
        try:
            result = self._env.step(action)
        except Exception as error:  # as above
            self.episode.fail(error)
            return
        self.episode.advance(action, result)

    def finish(self) -> Trajectory:
        """The recorded trajectory; the environment is closed."""
        with suppress(Exception):  # the record is complete, whatever closing the environment raises
            close_environment(self._env)
        return self.episode.trajectory()


def _generate(
    engine: TokenEngine, episodes: Sequence[_ActiveEpisode], greedy: bool
) -> list[tuple[_ActiveEpisode, Generation]]:
    """One generation for each episode. Those near their context limit may sample fewer tokens: a batch of their own."""
    batches: dict[tuple[int, tuple[int, ...]], list[_ActiveEpisode]] = defaultdict(list)
    for one in episodes:
        batches[one.episode.budget, one.episode.stop_tokens].append(one)
    pairs: list[tuple[_ActiveEpisode, Generation]] = []
    for (budget, stops), batch in batches.items():
        prompts = [one.episode.tokens for one in batch]
        streams = [one.episode.spec.stream for one in batch]
        pairs += zip(batch, engine.generate(prompts, budget, stops, greedy, streams), strict=True)
    return pairs
