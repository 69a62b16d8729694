"""The losses of one optimizer step, over whole-step decision vectors. What a micro-batch adds is a slice of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.config import AlgorithmConfig
from megatron_rl.objectives.aggregation import count, decision_weights, sequence_weights, weighted_sum
from megatron_rl.objectives.divergence import kl_loss
from megatron_rl.objectives.importance import (
    effective_sample_size,
    product_log_weights,
    ratio,
    sample_size_sums,
    self_normalise,
    truncated_weights,
    weighted_mean_sums,
)
from megatron_rl.objectives.policy import PolicyLoss, dual_clip, ewma_decoupled, ppo_clip
from megatron_rl.objectives.segments import repeat
from megatron_rl.objectives.value import value_loss

POLICY_SUMS = ("loss", "policy", "entropy", "kl", "clip_low", "clip_high", "ratio", "magnitude")
"""Logged sums of the policy step, in order. `magnitude` is Σ|w·term|: the scale rounding errors are measured
against."""
VALUE_SUMS = ("loss", "value", "clipped", "magnitude")


def loss_weights(algorithm: AlgorithmConfig, offsets: torch.Tensor, rows: torch.Tensor, prompts: torch.Tensor):
    """Loss weight of every decision of one optimizer step (spec §8), from the whole step's counts.

    Args:
        offsets: int64 [B+1].
        rows: int64, trajectories of the step; all others weigh 0.
        prompts: int64 [B] prompt number of each trajectory.

    Returns:
        float32 [D].
    """
    lengths = torch.zeros_like(offsets.diff())
    lengths[rows] = offsets.diff()[rows]
    counts, sizes = count(lengths, prompts)
    if not counts.decisions:
        return torch.zeros(int(offsets[-1]), device=offsets.device)
    per_sequence = sequence_weights(
        algorithm.aggregation, lengths, counts, prompt_sizes=sizes, constant=algorithm.aggregation_constant
    )
    return decision_weights(per_sequence, offsets)


def importance_weights(
    algorithm: AlgorithmConfig,
    anchor: torch.Tensor,
    behaviour: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """ω [D] that corrects from μ to the anchor, decided on whole sequences; None where no correction is configured.

    Args:
        anchor, behaviour: [D] log π_anchor, log μ.
        weights: [D] loss weights; 0 outside the step.

    Returns:
        (ω or None, effective sample sizes as shares of tokens or sequences).
    """
    counted = weights != 0
    log_ratio = torch.where(counted, anchor - behaviour, 0.0)
    if algorithm.token_is_cap is not None:
        omega = truncated_weights(log_ratio, algorithm.token_is_cap)
        share = effective_sample_size(sample_size_sums(omega, counted))[1]
        return omega, {"is/token_ess": float(share)}
    if algorithm.sequence_is_cap is None:
        return None, {}
    present = product_log_weights(counted.float(), offsets) > 0
    per_sequence = truncated_weights(product_log_weights(log_ratio.double(), offsets), algorithm.sequence_is_cap)
    share = effective_sample_size(sample_size_sums(per_sequence, present))[1]
    capped = (per_sequence >= algorithm.sequence_is_cap * (1 - 1e-6))[present].double().mean()
    if algorithm.sequence_is_normalise:
        per_sequence = self_normalise(per_sequence, ratio(weighted_mean_sums(per_sequence, present)))
    return repeat(per_sequence, offsets).float(), {"is/sequence_ess": float(share), "is/sequence_capped": float(capped)}


@dataclass(frozen=True)
class PolicyTerms:
    """Vectors [D] of one policy step; called on the slots of a micro-batch."""

    algorithm: AlgorithmConfig
    advantages: torch.Tensor
    behaviour: torch.Tensor
    anchor: torch.Tensor
    reference: torch.Tensor | None
    weights: torch.Tensor
    importance: torch.Tensor | None

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`: readings are log-probs and entropies [2, n]."""
        logprobs, entropy = readings
        weights = self.weights[slots]
        policy = self._surrogate(slots, logprobs)
        omega = None if self.importance is None else self.importance[slots]
        terms = {"policy": weighted_sum(policy.loss, weights, omega)}
        if self.algorithm.entropy_coef:
            terms["bonus"] = -self.algorithm.entropy_coef * weighted_sum(entropy, weights)
        divergence = torch.zeros_like(logprobs)
        if self.algorithm.kl_loss_coef:
            drift = logprobs - self.behaviour[slots]
            divergence = kl_loss(logprobs, self.reference[slots], self.algorithm.kl_estimator, drift)
            terms["kl"] = self.algorithm.kl_loss_coef * weighted_sum(divergence, weights)
        loss = torch.stack(list(terms.values())).sum()
        with torch.no_grad():
            size = weighted_sum(policy.loss.abs(), weights, omega)
            size += weighted_sum(self.algorithm.kl_loss_coef * divergence.abs(), weights)
            shifted = (logprobs - self.anchor[slots]).clamp(-20, 20).exp()
            sums = [loss, terms["policy"], weighted_sum(entropy, weights), weighted_sum(divergence, weights)]
            sums += [weighted_sum(x.float(), weights) for x in (policy.clipped_low, policy.clipped_high, shifted)]
        return loss, torch.stack([x.detach().double() for x in (*sums, size)])

    def _surrogate(self, slots: torch.Tensor, logprobs: torch.Tensor) -> PolicyLoss:
        algorithm, advantages, anchor = self.algorithm, self.advantages[slots], self.anchor[slots]
        if algorithm.anchor == "ewma" and self.importance is None:
            return ewma_decoupled(
                logprobs, anchor, self.behaviour[slots], advantages, algorithm.clip_low, algorithm.clip_high,
                algorithm.ewma_ratio_cap,
            )  # fmt: skip
        clipped = ppo_clip(logprobs - anchor, advantages, algorithm.clip_low, algorithm.clip_high)
        return clipped if algorithm.dual_clip is None else dual_clip(clipped, advantages, algorithm.dual_clip)


@dataclass(frozen=True)
class ValueTerms:
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
            values, self.returns[slots], self.old_values[slots], self.algorithm.value_clip
        )
        loss = weighted_sum(per_decision, weights)
        with torch.no_grad():
            sums = (loss, loss, weighted_sum(clipped.float(), weights), loss)
        return loss, torch.stack([x.detach().double() for x in sums])


@dataclass(frozen=True)
class LikelihoodTerms:
    """Supervised cold start: −Σ w log π over demonstrated decisions."""

    weights: torch.Tensor

    def __call__(self, slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `backend.step.LossFunction`."""
        loss = weighted_sum(-readings[0], self.weights[slots])
        return loss, loss.detach().double()[None]
