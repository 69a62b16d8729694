"""Methods as a user would write them, chosen by `package.module:name`."""

from __future__ import annotations

from typing import Literal

import torch

from megatron_rl.methods import (
    AdvantageEstimator,
    Estimate,
    EstimatorInputs,
    PolicyInputs,
    PolicyLossMethod,
    PolicyTerm,
)


def squared(x: PolicyInputs, *, strength: float = 0.5) -> torch.Tensor:
    """−A log π_θ + strength (log π_θ − log π_anchor)²/2 per decision."""
    return -x.advantages * x.logprobs + strength * x.log_ratio.square() / 2


class TurnSquared(PolicyLossMethod):
    """The same on the mean log-ratio of a turn: terms of several decisions."""

    strength: float = 0.5
    """Factor of the square."""
    clock = "turn"

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """Copied to the turn's decisions."""
        from megatron_rl.objectives.segments import repeat, segment_mean

        turns = x.whole.turn_offsets
        mean = repeat(segment_mean(x.log_ratio, turns), turns)
        return PolicyTerm(-x.advantages * x.logprobs + self.strength * mean.square() / 2)


def median(x: EstimatorInputs, *, scale: float = 1.0) -> torch.Tensor:
    """Return minus the median return of the batch, [D]."""
    from megatron_rl.objectives.segments import repeat

    return repeat(scale * (x.returns - x.returns[x.included].median()), x.times.offsets)


class GroupMedian(AdvantageEstimator):
    """Return minus the median of the group."""

    direction: Literal["up", "down"] = "up"
    """Whether more reward is better."""
    needs_groups, unit = True, "sequence"

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """The trajectory's advantage at each of its decisions."""
        from megatron_rl.objectives.segments import repeat

        centred = torch.zeros_like(x.returns)
        for group in x.group_ids[x.included].unique():
            rows = (x.group_ids == group) & x.included
            centred[rows] = x.returns[rows] - x.returns[rows].median()
        return Estimate(repeat(centred if self.direction == "up" else -centred, x.times.offsets))
