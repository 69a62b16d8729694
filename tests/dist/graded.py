"""A frozen lake that grades whatever is said, so that an untrained policy's rewards differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.environments.base import EpisodeSpec, StepResult, TextEnvironment
from megatron_rl.environments.frozen_lake import FrozenLakeTask


class GradedLake(FrozenLakeTask):
    """Every turn earns a fifth for each of the five classes its tokens' sum falls in; an odd sum counts as solved."""

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The lake, graded."""
        return _Graded(super().make_env(spec))


class _Graded:
    def __init__(self, inner: TextEnvironment) -> None:
        self._inner, self.stop_tokens = inner, inner.stop_tokens

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        return self._inner.reset(seed, options)

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        seen, total = self._inner.step(action_tokens), sum(action_tokens)
        return replace(seen, reward=seen.reward + total % 5 / 5, info={**seen.info, "success": total % 2 == 1})

    def valid_actions(self) -> list[list[int]]:
        return self._inner.valid_actions()


class CoarseLake(FrozenLakeTask):
    """A turn earns 1 where its tokens' sum divides by seven, else nothing: some groups earn the same, others do not."""

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The lake, graded coarsely."""
        return _Coarse(super().make_env(spec))


class _Coarse(_Graded):
    def step(self, action_tokens: Sequence[int]) -> StepResult:
        return replace(self._inner.step(action_tokens), reward=float(sum(action_tokens) % 7 == 0))


class FailingLake(GradedLake):
    """The graded lake, whose environments raise when they are acted upon, but for every fourth episode."""

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The lake, graded or failing."""
        lake = super().make_env(spec)
        return lake if int(spec.trajectory_id.rsplit("-", 1)[1]) % 4 == 0 else _Failing(lake)


class _Failing(_Graded):
    def step(self, action_tokens: Sequence[int]) -> StepResult:
        raise KeyError("no answer is known")
