"""The losses of one optimizer step, over whole-step decision vectors. What a micro-batch adds is a slice of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithm.whole_step import StepVectors, WholeStepLoss, masks
from megatron_rl.config import AlgorithmConfig
from megatron_rl.methods import AggregationRule, PolicyInputs
from megatron_rl.objectives.aggregation import count, decision_weights, weighted_sum
from megatron_rl.objectives.divergence import kl_loss
from megatron_rl.objectives.policy import sft
from megatron_rl.objectives.segments import compact
from megatron_rl.objectives.value import value_loss

POLICY_SUMS = ("loss", "policy", "entropy", "kl", "clip_low", "clip_high", "ratio", "magnitude")
"""Logged sums of the policy step, in order. `magnitude` is Σ|w·term|: the scale rounding errors are measured
against."""
VALUE_SUMS = ("loss", "value", "clipped", "magnitude")


def loss_weights(
    rule: AggregationRule, offsets: torch.Tensor, kept: torch.Tensor, prompts: torch.Tensor
) -> torch.Tensor:
    """Loss weight of every decision of one optimizer step (spec §8), from the whole step's counts.

    Args:
        rule: how decisions and sequences are averaged.
        offsets: int64 [B+1].
        kept: bool [D]: decisions of the step's loss, after removal; all others weigh 0. For a turn critic the first one
            of each turn.
        prompts: int64 [B] prompt number of each trajectory.

    Returns:
        float32 [D].
    """
    lengths = compact(kept, offsets)[1].diff()
    counts, sizes = count(lengths, prompts)
    if not counts.decisions:
        return torch.zeros(int(offsets[-1]), device=offsets.device)
    per_sequence = rule.sequence_weights(lengths, counts, sizes)
    return decision_weights(per_sequence, offsets, kept)


@dataclass(frozen=True)
class PolicyStepLoss:
    """The policy's loss of one step; called on the slots of a micro-batch."""

    algorithm: AlgorithmConfig
    vectors: StepVectors
    kl_coef: float
    """β_KL of the KL loss at this step."""
    whole: WholeStepLoss | None = None
    """The policy term where it is evaluated on the whole step."""

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`: readings are log-probs and entropies [2, n]."""
        logprobs, entropy = readings
        weights = self.vectors.weights[slots]
        policy, value, size, clipped = self._policy(slots, logprobs, weights)
        terms = {"policy": policy}
        if self.algorithm.entropy_coef:
            terms["bonus"] = -self.algorithm.entropy_coef * weighted_sum(entropy, weights)
        divergence = torch.zeros_like(logprobs)
        if (kl := self.algorithm.kl_loss) and self.kl_coef:
            assert self.vectors.reference is not None
            drift = logprobs - self.vectors.behaviour[slots]
            divergence = kl_loss(logprobs, self.vectors.reference[slots], kl.estimator, drift)
            terms["kl"] = self.kl_coef * weighted_sum(divergence, weights)
        if self.vectors.likelihood is not None:
            terms["likelihood"] = weighted_sum(sft(logprobs), self.vectors.likelihood[slots])
        loss = torch.stack(list(terms.values())).sum()
        with torch.no_grad():
            size = size + weighted_sum(self.kl_coef * divergence.abs(), weights)
            shifted = (logprobs - self.vectors.anchor[slots]).clamp(-20, 20).exp()
            shown = loss if self.whole is None else loss - policy + value
            sums = [shown, value, weighted_sum(entropy, weights), weighted_sum(divergence, weights)]
            sums += [weighted_sum(x.float(), weights) for x in (*clipped, shifted)]
        return loss, torch.stack([x.detach().double() for x in (*sums, size)])

    def _policy(self, slots: torch.Tensor, logprobs: torch.Tensor, weights: torch.Tensor):
        """(term whose gradient is followed, its value, its size, clip masks)."""
        if self.whole is not None:
            values = self.whole.values[slots]
            term = weighted_sum(logprobs, self.whole.coefficients[slots])
            clipped = self.whole.clipped_low[slots], self.whole.clipped_high[slots]
            return term, values.sum(), values.abs().sum(), clipped
        found = self.algorithm.policy.loss(
            PolicyInputs(
                logprobs, self.vectors.anchor[slots], self.vectors.behaviour[slots], self.vectors.advantages[slots],
                self.algorithm.ratio_cap,
            )
        )  # fmt: skip
        omega = None if self.vectors.importance is None else self.vectors.importance[slots]
        term = weighted_sum(found.loss, weights, omega)
        return term, term, weighted_sum(found.loss.detach().abs(), weights, omega), masks(found)


@dataclass(frozen=True)
class CoefficientStepLoss:
    """Σ c_j log π_θ(a_j): the gradient of any loss with these coefficients."""

    coefficients: torch.Tensor

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`."""
        loss = weighted_sum(readings[0], self.coefficients[slots])
        return loss, loss.detach().double()[None]


@dataclass(frozen=True)
class ValueStepLoss:
    """Vectors [D] of one critic step; bootstrap slots (beyond D) carry no loss."""

    algorithm: AlgorithmConfig
    returns: torch.Tensor
    old_values: torch.Tensor
    weights: torch.Tensor

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`: readings are values [1, n]."""
        decision = slots < len(self.returns)
        slots, values = slots[decision], readings[0][decision]
        weights = self.weights[slots]
        per_decision, clipped = value_loss(
            values, self.returns[slots], self.old_values[slots], self.algorithm.critic.clip
        )
        loss = weighted_sum(per_decision, weights)
        with torch.no_grad():
            sums = (loss, loss, weighted_sum(clipped.float(), weights), loss)
        return loss, torch.stack([x.detach().double() for x in sums])


@dataclass(frozen=True)
class LikelihoodStepLoss:
    """Supervised warm start: −Σ w log π over demonstrated decisions."""

    weights: torch.Tensor

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`."""
        loss = weighted_sum(-readings[0], self.weights[slots])
        return loss, loss.detach().double()[None]
