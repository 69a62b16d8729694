"""Plays many text environments in lock step with one engine and records what happened, token by token.

Invariants of every recorded trajectory:

* Its tokens are exactly what was fed or sampled, in order; it ends with a sampled token (or has none at all, when the
  environment failed to start). An observation that nobody acted upon is never among them: after a truncation it is
  `boundary_tokens`, after a termination it is dropped.
* One model call is one turn; K turns have K `turn_rewards`; `reward` (a terminal reward on top of them) is 0.
* `truncated` and `terminated` exclude each other. A length cut in the middle of an action leaves the environment
  untouched: nothing new was seen (`boundary_tokens` is empty) and the turn earns 0.
* `routes` keeps the row that was used when a token was first fed. Rows that a later call computed differently
  (a prefix prefilled again, after a weight change for instance) are counted in `metadata["route_conflicts"]`.

Metadata of a trajectory: `seed`, `success`, `invalid_actions`, `repeated_actions`, `route_conflicts`, `greedy`,
`seconds` (from the start to the end, waiting for the batch included) and, after an environment error, `error`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.engines import Generation, TokenEngine
from megatron_rl.engines.environments import StepResult, TextEnvironment
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import Trajectory


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play."""

    trajectory_id: str
    prompt_id: str
    group_id: str
    seed: int | None = None
    """Given to the environment's `reset`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Read by `make_env`, for instance the map or the start state."""


MakeEnvironment = Callable[[EpisodeSpec], TextEnvironment]


@dataclass(frozen=True)
class Demonstration:
    """A played token sequence for supervised training."""

    tokens: np.ndarray
    """int32 [N]."""
    action_mask: np.ndarray
    """bool [N]: 1 on the tokens of actions."""
    success: bool
    """Whether the task got solved, by luck."""


def play_episodes(
    engine: TokenEngine,
    make_env: MakeEnvironment,
    specs: Sequence[EpisodeSpec],
    *,
    max_turns: int,
    max_action_tokens: int,
    context_limit: int,
    greedy: bool = False,
    concurrency: int = 128,
) -> list[Trajectory]:
    """Play all episodes, at most `concurrency` at a time; an ended one is replaced at once.

    Args:
        engine: called once per turn with the exact tokens of every episode in flight.
        make_env: builds the environment of one episode.
        specs: what to play.
        max_turns: model calls of an episode; one that needs more is `truncated_turns`.
        max_action_tokens: sampled tokens of a turn, stop token included; a longer action is handed over as it is.
        context_limit: most tokens of an episode; one that needs more is `truncated_length`.
        greedy: see the engine; greedy trajectories are for evaluation only.
        concurrency: batch size of the engine.

    Returns:
        One trajectory for each spec, in the order of `specs`. An exception in an environment ends its episode with
        the outcome `environment_error` and what was recorded so far.

    Raises:
        ConfigError: a limit is below 1, or a first observation leaves no room for an action.
    """
    limits = _Limits(max_turns, max_action_tokens, context_limit, concurrency)
    waiting = deque(enumerate(specs))
    active: dict[int, _Episode] = {}
    finished: dict[int, Trajectory] = {}
    while waiting or active:
        while waiting and len(active) < concurrency:
            place, spec = waiting.popleft()
            active[place] = _Episode(spec, make_env, limits, greedy)
        running = [episode for episode in active.values() if episode.outcome is None]
        for episode, generation in _generate(engine, running, greedy):
            episode.play(generation)
        finished |= {place: episode.trajectory() for place, episode in active.items() if episode.outcome is not None}
        active = {place: episode for place, episode in active.items() if episode.outcome is None}
    return [finished[place] for place in range(len(specs))]


def random_play(
    make_env: MakeEnvironment, specs: Sequence[EpisodeSpec], *, max_turns: int, context_limit: int, seed: int = 0
) -> list[Demonstration]:
    """Play uniformly random valid actions: supervised training on it teaches the format of actions, not which is good.

    Args:
        make_env, specs, max_turns: as for `play_episodes`.
        context_limit: an action that would exceed it is not played.
        seed: seed of the choice of actions.

    Returns:
        One demonstration for each spec, without the observation after its last action.
    """
    rng = np.random.default_rng(seed)
    return [_random_episode(make_env(spec), spec, rng, max_turns, context_limit) for spec in specs]


def _random_episode(
    env: TextEnvironment, spec: EpisodeSpec, rng: np.random.Generator, max_turns: int, context_limit: int
) -> Demonstration:
    tokens, mask, success = [], [], False
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


def _generate(engine: TokenEngine, episodes: Sequence[_Episode], greedy: bool) -> list[tuple[_Episode, Generation]]:
    """One model call for each episode. Those near their context limit may sample fewer tokens: a batch of their own."""
    alike: dict[tuple[int, tuple[int, ...]], list[_Episode]] = defaultdict(list)
    for episode in episodes:
        alike[episode.budget, tuple(episode.env.stop_tokens)].append(episode)
    pairs: list[tuple[_Episode, Generation]] = []
    for (budget, stops), batch in alike.items():
        pairs += zip(batch, engine.generate([e.tokens for e in batch], budget, stops, greedy), strict=True)
    return pairs


@dataclass(frozen=True)
class _Limits:
    max_turns: int
    max_action_tokens: int
    context_limit: int
    concurrency: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError("limit of an episode", field=name, found=value, expected=">= 1", setting=name)


class _Episode:
    """One episode in flight; `outcome` is None as long as it runs."""

    env: TextEnvironment

    def __init__(self, spec: EpisodeSpec, make_env: MakeEnvironment, limits: _Limits, greedy: bool) -> None:
        self.spec, self._limits = spec, limits
        self.tokens: list[int] = []
        self._turn_id: list[int] = []
        self._logprobs: list[float] = []
        self._version: list[int] = []
        self._turn_rewards: list[float] = []
        self._actions: list[tuple[int, ...]] = []
        self._routes: np.ndarray | None = None
        self._boundary: list[int] | None = None
        self.outcome: str | None = None
        self.terminated = self.truncated = False
        self._metadata: dict[str, Any] = {
            "seed": spec.seed, "success": False, "invalid_actions": 0, "repeated_actions": 0, "route_conflicts": 0,
            "greedy": greedy,
        }  # fmt: skip
        self._started = time.monotonic()
        self._start(make_env)

    @property
    def budget(self) -> int:
        """Tokens that the next action may have; 0 or less: no room."""
        return min(self._limits.max_action_tokens, self._limits.context_limit - len(self.tokens))

    def play(self, generation: Generation) -> None:
        """Record one model call, and hand its action to the environment if it is whole."""
        budget = self.budget
        self._record(generation)
        action = tuple(int(token) for token in generation.tokens)
        if action[-1] not in self.env.stop_tokens and len(action) == budget < self._limits.max_action_tokens:
            self._truncate("truncated_length", [])
            return
        try:
            result = self.env.step(action)
        except Exception as error:  # whatever an environment throws ends its episode, not the run
            self._fail(error)
            return
        self._count(action, result)
        self._advance(result)

    def trajectory(self) -> Trajectory:
        """The record. Only after `outcome` is set."""
        turn_id = np.asarray(self._turn_id, np.int16)
        self._metadata["seconds"] = round(time.monotonic() - self._started, 6)
        return Trajectory(
            trajectory_id=self.spec.trajectory_id,
            prompt_id=self.spec.prompt_id,
            group_id=self.spec.group_id,
            tokens=np.asarray(self.tokens, np.int32),
            action_mask=turn_id >= 0,
            turn_id=turn_id,
            logprobs=np.asarray(self._logprobs, np.float32),
            version=np.asarray(self._version, np.int32),
            turn_rewards=np.asarray(self._turn_rewards, np.float32),
            reward=0.0,
            outcome=str(self.outcome),
            terminated=self.terminated,
            truncated=self.truncated,
            boundary_tokens=None if self._boundary is None else np.asarray(self._boundary, np.int32),
            routes=self._routes,
            metadata=self._metadata,
        )

    def _start(self, make_env: MakeEnvironment) -> None:
        try:
            self.env = make_env(self.spec)
            first = self.env.reset(self.spec.seed, self.spec.options)
        except Exception as error:  # as in play
            self._fail(error)
            return
        self._observe(first)
        if self.budget < 1:
            raise ConfigError(
                "the first observation leaves no room for an action", field="tokens", found=len(first),
                expected=f"< {self._limits.context_limit}", setting="context_limit",
            )  # fmt: skip

    def _observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self._turn_id += [-1] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._version += [0] * len(tokens)

    def _record(self, generation: Generation) -> None:
        n = len(generation.tokens)
        self._merge_routes(generation.routes)
        self.tokens += generation.tokens.tolist()
        self._turn_id += [len(self._turn_rewards)] * n
        self._logprobs += generation.logprobs.tolist()
        self._version += [generation.version] * n
        self._turn_rewards.append(0.0)

    def _merge_routes(self, routes: np.ndarray | None) -> None:
        """Append the rows of newly fed tokens; rows of tokens fed before are compared as sets, not replaced."""
        if self._routes is None or routes is None:
            self._routes = routes
            return
        held = self._routes.shape[1]
        different = np.sort(routes[:, :held], axis=-1) != np.sort(self._routes, axis=-1)
        self._metadata["route_conflicts"] += int(different.any(-1).sum())
        self._routes = np.concatenate([self._routes, routes[:, held:]], axis=1)

    def _count(self, action: tuple[int, ...], result: StepResult) -> None:
        self._turn_rewards[-1] = float(result.reward)
        self._metadata["success"] = bool(result.info.get("success", False))
        self._metadata["invalid_actions"] += bool(result.info.get("invalid", False))
        self._metadata["repeated_actions"] += self._actions[-1:] == [action]
        self._actions.append(action)

    def _advance(self, result: StepResult) -> None:
        if result.terminated:
            self.outcome, self.terminated = "completed", True
        elif result.truncated or len(self._turn_rewards) == self._limits.max_turns:
            self._truncate("truncated_turns", result.observation)
        elif len(self.tokens) + len(result.observation) >= self._limits.context_limit:
            self._truncate("truncated_length", result.observation)
        else:
            self._observe(result.observation)

    def _truncate(self, outcome: str, boundary: list[int]) -> None:
        self.outcome, self.truncated, self._boundary = outcome, True, boundary

    def _fail(self, error: Exception) -> None:
        self.outcome = "environment_error"
        self._metadata["error"] = f"{type(error).__name__}: {error}"
