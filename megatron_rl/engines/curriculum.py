"""What to play next, and from where: rising difficulty, and starts spread over an episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from megatron_rl.engines.environments import StepResult, TextEnvironment, close_environment
from megatron_rl.engines.episode_state import EpisodeSpec
from megatron_rl.engines.episodes import MakeEnvironment
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, Trajectory

START_TURN = "start_turn"
"""Option of a spec and entry of a trajectory's metadata."""


class Curriculum:
    """Episodes of one level until enough of them succeed, then of the next: an iterator of specs for `player.play`.

    Call `finished` with each trajectory, for instance in `on_finished`. The level rises once the last `window` episodes
    of the present level succeeded at a rate of at least `promote_at`; it never falls. Episodes of earlier levels and
    those that the environment or the engine failed do not count.

    Args:
        levels: specs of each level, easiest first; they may be endless. Trajectory ids differ.
        promote_at: success rate that ends a level.
        window: episodes the rate is taken over.
        level: where to start, for instance after a restart.

    Raises:
        ConfigError: no levels, or a number out of range.
    """

    def __init__(
        self, levels: Sequence[Iterable[EpisodeSpec]], *, promote_at: float = 0.8, window: int = 64, level: int = 0
    ) -> None:
        for name, value, low, high in (("level", level, 0, len(levels) - 1), ("promote_at", promote_at, 0, 1),
                                       ("window", window, 1, float("inf"))):  # fmt: skip
            if not low <= value <= high:
                raise ConfigError("curriculum", field=name, found=value, expected=f"{low}..{high}", setting=name)
        self._levels = [iter(specs) for specs in levels]
        self.level, self._promote_at = level, promote_at
        self._in_flight: dict[str, int] = {}
        self._recent: deque[bool] = deque(maxlen=window)

    def __iter__(self) -> Iterator[EpisodeSpec]:
        return self

    def __next__(self) -> EpisodeSpec:
        spec = next(self._levels[self.level])
        self._in_flight[spec.trajectory_id] = self.level
        return spec

    @property
    def success(self) -> float:
        """Success rate over the window; NaN before anything finished on this level."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    def finished(self, trajectory: Trajectory) -> None:
        """Take the result of an episode."""
        level = self._in_flight.pop(trajectory.trajectory_id, None)
        if level != self.level or trajectory.outcome in EXCLUDED_OUTCOMES:
            return
        self._recent.append(bool(trajectory.metadata.get("success", False)))
        full = len(self._recent) == self._recent.maxlen
        if full and self.success >= self._promote_at and self.level + 1 < len(self._levels):
            self.level += 1
            self._recent.clear()


def stagger(specs: Iterable[EpisodeSpec], turns: int, seed: int = 0) -> Iterator[EpisodeSpec]:
    """Give each group a start turn, uniform over 0..turns, as the option ``start_turn``.

    It depends on the group's id and `seed` only: a group shares its start state, ranks agree without talking, and the
    order does not matter. Let `staggered` build the environments.
    """
    for spec in specs:
        start = _hash(spec.group_id, seed) % (turns + 1)
        yield replace(spec, options={**spec.options, START_TURN: start})


def staggered(make_env: MakeEnvironment, seed: int = 0) -> MakeEnvironment:
    """Build environments that have played ``start_turn`` random valid actions before their first observation."""

    def make(spec: EpisodeSpec) -> TextEnvironment:
        return StaggeredStart(make_env(spec), spec.options.get(START_TURN, 0), _hash(spec.group_id, seed + 1))

    return make


def _hash(text: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), seed)


class StaggeredStart:
    """An environment whose episodes start after some random valid actions, so that early states are not all one sees.

    If the episode would end meanwhile, it starts just before the action that ended it; if it ends again on the way
    there (the environment is random), from its own start. The turn it did start at is in `info["start_turn"]`.

    Args:
        inner: must know its `valid_actions`.
        turns: actions to play first.
        seed: seed of their choice.
    """

    def __init__(self, inner: TextEnvironment, turns: int, seed: int) -> None:
        self.inner, self.stop_tokens = inner, inner.stop_tokens
        self._turns, self._seed, self._started_at = turns, seed, 0

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Start the inner episode, play the random actions and return what is seen then."""
        turns = self._turns
        for _ in range(2):
            observation, played = self._play(turns, seed, options)
            if played == turns:
                self._started_at = turns
                return observation
            turns = played
        self._started_at = 0
        return self.inner.reset(seed, options)

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Play the action in the inner environment."""
        result = self.inner.step(action_tokens)
        return replace(result, info={**result.info, START_TURN: self._started_at})

    def valid_actions(self) -> list[list[int]]:
        """The inner environment's."""
        return self.inner.valid_actions()

    def close(self) -> None:
        """Close the inner environment."""
        close_environment(self.inner)

    def _play(self, turns: int, seed: int | None, options: Mapping[str, Any] | None) -> tuple[list[int], int]:
        """What is seen after `turns` actions, and how many were played without ending the episode."""
        rng = np.random.default_rng(self._seed)
        observation = self.inner.reset(seed, options)
        for turn in range(turns):
            actions = self.inner.valid_actions()
            result = self.inner.step(actions[rng.integers(len(actions))])
            if result.terminated or result.truncated:
                return observation, turn
            observation = result.observation
        return observation, turns
