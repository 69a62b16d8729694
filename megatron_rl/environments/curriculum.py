"""Curriculum and staggered starts: levels of rising difficulty, and episodes that start at later states.

Invariants:

* The level is a function of the results counted and their order: processes that count the same are at the same level.
* What is played at a level is a pure function of (iteration, count), as for any task, and is never what the run
  evaluates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from megatron_rl.environments.base import EpisodeSpec, StepResult, Task, TextEnvironment, close_environment
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES

LEVEL = "level"
"""Entry of a trajectory's metadata: the level it was played at, from 0."""
START_TURN, START_SEED = "start_turn", "start_seed"
"""Options of a spec: how many actions are played before it starts, and the seed of their choice. The turn it did start
at is in its trajectory's metadata."""
DOUBLINGS = 6
"""How often a level is asked for twice as many episodes where those it drew are evaluated."""


class Curriculum:
    """Which level is played: the next one once enough episodes of the present one succeed.

    The level rises when the last `window` episodes of the present level succeeded at a rate of at least `promote_at`,
    as seen each time results are counted (one, or a whole iteration's). It never falls. Results of other levels and
    those that the environment or the engine failed do not count.

    Args:
        levels: how many there are.
        promote_at: success rate that ends a level.
        window: episodes the rate is taken over.
    """

    def __init__(self, levels: int, *, promote_at: float, window: int) -> None:
        self.levels, self._promote_at = levels, promote_at
        self._recent: deque[bool] = deque(maxlen=window)
        self.level = 0
        self.success: float | None = None
        """Success rate over the window when results were last counted, before a rise emptied it; None: of nothing."""

    def count(self, results: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Take the metadata and the outcome of finished trajectories, in the order that decides what is recent."""
        for metadata, outcome in results:
            if metadata.get(LEVEL) == self.level and outcome not in EXCLUDED_OUTCOMES:
                self._recent.append(bool(metadata.get("success", False)))
        self.success = sum(self._recent) / len(self._recent) if self._recent else None
        full = len(self._recent) == self._recent.maxlen
        if full and self.success is not None and self.success >= self._promote_at and self.level + 1 < self.levels:
            self.level += 1
            self._recent.clear()

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as JSON."""
        return {"level": self.level, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the state that `state` returned.

        Raises:
            ConfigError: there is no such level any more.
        """
        require_level(state["level"], self.levels)
        self.level = state["level"]
        self._recent = deque(state["recent"], maxlen=self._recent.maxlen)


def require_level(level: int, levels: int) -> None:
    """Raise ConfigError where a run has reached a level that its configuration does not have."""
    if level >= levels:
        raise ConfigError(
            "the run has been at a level of its curriculum that is gone", found=f"level {level}",
            expected=f"0..{levels - 1}", setting="rollout.curriculum.levels",
        )  # fmt: skip


class TrainingTask:
    """A task as a run trains on it: without what the run evaluates, and from staggered starts.

    Args:
        task: what is played.
        evaluated: prompts that are left out.
        stagger_turns: most actions before a start. The number is uniform over 0..stagger_turns, shared by a group, and
            follows from group, iteration and seed only.
        seed: of the starts.
    """

    def __init__(self, task: Task, *, evaluated: Collection[str] = (), stagger_turns: int = 0, seed: int = 0) -> None:
        self._task, self._evaluated, self._turns, self._seed = task, frozenset(evaluated), stagger_turns, seed
        self.vocabulary, self.evaluation_specs = task.vocabulary, task.evaluation_specs

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The task's environment; `reset` plays the spec's first actions before it returns an observation."""
        env, options = self._task.make_env(spec), spec.options
        return StaggeredStart(env, options[START_TURN], options[START_SEED]) if START_TURN in options else env

    def training_specs(self, iteration: int, count: int) -> list[EpisodeSpec]:
        """See `Task`.

        Raises:
            ConfigError: nearly everything the task draws is evaluated.
        """
        specs = self._not_evaluated(iteration, count)
        return [self._staggered(iteration, spec) for spec in specs] if self._turns else specs

    def _not_evaluated(self, iteration: int, count: int) -> list[EpisodeSpec]:
        for doubling in range(DOUBLINGS + 1):
            specs = self._task.training_specs(iteration, count << doubling)
            fresh = [spec for spec in specs if spec.prompt_id not in self._evaluated]
            if len(fresh) >= count:
                return fresh[:count]
        raise ConfigError(
            "nothing is left to train on but what is evaluated",
            found=f"{len(fresh)} of {len(specs)} episodes are of other prompts", expected=f"{count} episodes",
            setting="rollout.environment_options, rollout.curriculum.levels, or evaluation_episodes",
        )  # fmt: skip

    def _staggered(self, iteration: int, spec: EpisodeSpec) -> EpisodeSpec:
        name = f"{iteration}/{spec.group_id}".encode()
        drawn, seed = xxhash.xxh3_64_intdigest(name, self._seed), xxhash.xxh3_64_intdigest(name, self._seed + 1)
        return replace(spec, options={**spec.options, START_TURN: drawn % (self._turns + 1), START_SEED: seed})


class StaggeredStart:
    """An environment whose episodes start after some random valid actions, so that later states are visited too.

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
        own = {name: value for name, value in (options or {}).items() if name not in (START_TURN, START_SEED)}
        turns = self._turns
        for _ in range(2):
            observation, played = self._play(turns, seed, own)
            if played == turns:
                self._started_at = turns
                return observation
            turns = played
        self._started_at = 0
        return self.inner.reset(seed, own)

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

    def _play(self, turns: int, seed: int | None, options: Mapping[str, Any]) -> tuple[list[int], int]:
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
