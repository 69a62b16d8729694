"""Policy losses, to be minimised: one per decision (`[D]`), sequence (`[B]`) or turn (`[K]`).

ℓ = log π_θ - log π_anchor is `log_ratio` `[D]` and carries the gradient; r = exp(ℓ). Ratios are formed in at least
float32. Where ℓ, or its sum or mean over a segment, is exponentiated, it is clamped to ±20; beyond, the gradient is
zero. A loss of a sequence or turn is copied to its decisions with `segments.repeat`; the loss weights of `aggregation`
then apply. Advantages and importance weights never carry gradients. Removed decisions must be taken off the timeline
first (`segments.compact`).

An entry is "clipped" where the loss takes the value at the bound, whose gradient is zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.objectives.numerics import bounded_exp, check_same_shape, widen
from megatron_rl.objectives.segments import local_segment_sum, repeat, segment_mean


class PolicyLoss(NamedTuple):
    """A clipped policy loss and where it was clipped."""

    loss: Tensor
    clipped_low: Tensor
    """bool: the ratio is below the lower bound and the advantage negative."""
    clipped_high: Tensor
    """bool: the ratio is above the upper bound and the advantage positive, or dual clip bounds the loss."""

    @property
    def clipped(self) -> Tensor:
        """bool: clipped on either side."""
        return self.clipped_low | self.clipped_high


def reinforce(logprobs: Tensor, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """-sg(w) A log π_θ per decision (Williams 1992). All `[D]`; `weights` w defaults to 1."""
    check_same_shape(logprobs=logprobs, advantages=advantages)
    scaled = advantages.detach() if weights is None else advantages.detach() * weights.detach()
    return -scaled * widen(logprobs)


def sft(logprobs: Tensor) -> Tensor:
    """-log π_θ per decision `[D]`: for a warm start, or added for correct samples (VAPO, 2504.05118)."""
    return -widen(logprobs)


def ppo_clip(log_ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """max(-rA, -clip(r, 1-ε_l, 1+ε_h) A) (1707.06347); 0.2/0.28 is DAPO's Clip-Higher (2503.14476).

    Args:
        log_ratio, advantages: of one shape, per decision, or per segment with a segment's log-ratio.
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    return _clipped_surrogate(bounded_exp(log_ratio), advantages.detach(), clip_low, clip_high)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    # Equal to the maximum of both branches, and tells which one it is.
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    bounded = torch.where(high, 1 + clip_high, torch.where(low, 1 - clip_low, ratio))
    return PolicyLoss(-advantages * bounded, low, high)


def dual_clip(unbounded: PolicyLoss, advantages: Tensor, bound: float = 3.0) -> PolicyLoss:
    """min(loss, -cA) where A < 0, which bounds the loss of ratios above c (1912.09729). `bound` is c > 1."""
    check_same_shape(loss=unbounded.loss, advantages=advantages)
    advantages = advantages.detach()
    ceiling = -bound * advantages
    cut = (advantages < 0) & (unbounded.loss > ceiling)
    loss = torch.where(cut, ceiling.to(unbounded.loss.dtype), unbounded.loss)
    return PolicyLoss(loss, unbounded.clipped_low, unbounded.clipped_high | cut)


def gspo(
    log_ratio: Tensor,
    sequence_advantages: Tensor,
    offsets: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """PPO clipping of the sequence ratio s = exp(mean_j ℓ_j) (GSPO, 2507.18071); all fields `[B]`.

    Args:
        log_ratio: `[D]`.
        sequence_advantages: `[B]`.
    """
    return ppo_clip(segment_mean(log_ratio, offsets), sequence_advantages, clip_low, clip_high)


def gspo_token(
    log_ratio: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """PPO clipping of sg(s)·π_θ/sg(π_θ), with an advantage per decision (GSPO-token, 2507.18071); all fields `[D]`.

    The value of the ratio is that of the sequence, its gradient that of the decision. Advantages `[D]`.
    """
    log_ratio = widen(log_ratio)
    sequence = segment_mean(log_ratio.detach(), offsets)
    own = log_ratio - log_ratio.detach()
    return ppo_clip(repeat(sequence, offsets, total=own.numel()) + own, advantages, clip_low, clip_high)


def gmpo(
    log_ratio: Tensor,
    sequence_advantages: Tensor,
    offsets: Tensor,
    log_clip: float = 0.4,
) -> PolicyLoss:
    """-A exp(mean_j sgn(A)·min(sgn(A) ℓ_j, sgn(A) clip(ℓ_j, ±c))) per sequence (GMPO, 2507.20673).

    Args:
        log_ratio: `[D]`.
        sequence_advantages: `[B]`.
        log_clip: c, in nats.
    Returns:
        loss `[B]`; the clip masks are per decision, `[D]`.
    """
    advantages = sequence_advantages.detach()
    log_ratio = widen(log_ratio)
    signs = repeat(advantages.sign(), offsets, total=log_ratio.numel())
    high = (signs > 0) & (log_ratio > log_clip)
    low = (signs < 0) & (log_ratio < -log_clip)
    bounded = torch.where(high, log_clip, torch.where(low, -log_clip, log_ratio))
    geometric = bounded_exp(segment_mean(bounded, offsets))
    check_same_shape(sequences=geometric, sequence_advantages=advantages)
    return PolicyLoss(-advantages * geometric, low, high)


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_high: float, clip_low: float = 1.0
) -> PolicyLoss:
    """-sg(clip(r, 1-ε_l, 1+ε_h)) A log π_θ (CISPO, 2506.13585). All `[D]`.

    ε_l = 1 sets no lower bound; the paper gives no ε_h. The masks tell where the *weight* was clipped; the gradient of
    log π_θ remains.
    """
    check_same_shape(log_ratio=log_ratio, logprobs=logprobs, advantages=advantages)
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(reinforce(logprobs, advantages, weight), ratio < 1 - clip_low, ratio > 1 + clip_high)


def sapo(log_ratio: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """-(4/τ) σ(τ(r-1)) A with τ by the sign of A, `tau_negative` for A = 0 (SAPO, 2511.20347). All `[D]`."""
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    advantages, ratio = advantages.detach(), bounded_exp(log_ratio)
    # `where` of two Python numbers would be a float32 tensor, whatever the type of the ratio.
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_positive), tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def dis(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float = 0.3, clip_high: float = 5.0
) -> PolicyLoss:
    """-sg(r·1[1-ε_l < r < 1+ε_h]) A log π_θ, r = π_θ/μ without a proximal policy (SAO, 2607.07508). All `[D]`.

    ε_l/ε_h are 0.3/5.0 for mathematics and 0.8/3.0 for coding. Whether the paper detaches r in -r A is uncertain; the
    gradient is the same.

    Args:
        log_ratio: log π_θ - log μ, not of an anchor.
    """
    check_same_shape(log_ratio=log_ratio, logprobs=logprobs, advantages=advantages)
    ratio = bounded_exp(log_ratio.detach())
    low, high = ratio <= 1 - clip_low, ratio >= 1 + clip_high
    return PolicyLoss(torch.where(low | high, 0.0, reinforce(logprobs, advantages, ratio)), low, high)


def turn_ppo(
    log_ratio: Tensor,
    turn_advantages: Tensor,
    turn_offsets: Tensor,
    clip: float = 0.2,
) -> PolicyLoss:
    """PPO clipping of the turn ratio w = exp(Σ_j ℓ_j) (Turn-PPO, 2512.17008); all fields `[K]`.

    Args:
        log_ratio: `[D]`.
        turn_advantages: `[K]` of `advantages.turn_gae`.
    """
    return ppo_clip(local_segment_sum(widen(log_ratio), turn_offsets), turn_advantages, clip, clip)


def turn_is(
    log_ratio: Tensor,
    turn_advantages: Tensor,
    turn_offsets: Tensor,
    clip: float = 0.2,
) -> PolicyLoss:
    """PPO clipping of w = exp(mean_j ℓ_j) with one advantage per turn (the "Turn-PPO" of 2511.20718); all fields `[K]`.

    It is uncertain whether the paper averages the decisions' advantages over the turn (`segments.segment_mean`; this
    function) or keeps one per decision (`turn_is_per_decision`).
    """
    return ppo_clip(segment_mean(log_ratio, turn_offsets), turn_advantages, clip, clip)


def turn_is_per_decision(
    log_ratio: Tensor,
    advantages: Tensor,
    turn_offsets: Tensor,
    clip: float = 0.2,
) -> PolicyLoss:
    """`turn_is` with an advantage per decision: the turn's ratio, clipped at each decision; all fields `[D]`."""
    turns = segment_mean(log_ratio, turn_offsets)
    return ppo_clip(repeat(turns, turn_offsets, total=log_ratio.numel()), advantages, clip, clip)


def ewma_decoupled(
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 100.0,
) -> PolicyLoss:
    """PPO with the ratio clipped around an anchor π̄ that is not the sampler μ (PPO-EWMA, 2110.00641). All `[D]`.

    μ̃ = max(μ, sg(π_θ)/cap); loss = max(-A π_θ/μ̃, -A clip(π_θ/π̄, 1-ε_l, 1+ε_h) π̄/μ̃). Only log π_θ carries
    gradients.
    """
    check_same_shape(
        logprobs=logprobs, anchor_logprobs=anchor_logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages
    )
    logprobs, advantages = widen(logprobs), advantages.detach()
    anchor = widen(anchor_logprobs.detach())
    sampler = torch.maximum(widen(behaviour_logprobs.detach()), logprobs.detach() - math.log(ratio_cap))
    proximal = bounded_exp(logprobs.detach() - anchor)
    low = (advantages < 0) & (proximal < 1 - clip_low)
    high = (advantages > 0) & (proximal > 1 + clip_high)
    bound = torch.where(high, torch.full_like(proximal, 1 + clip_high), 1 - clip_low) * bounded_exp(anchor - sampler)
    return PolicyLoss(-advantages * torch.where(low | high, bound, bounded_exp(logprobs - sampler)), low, high)


def drpo(logprobs: Tensor, score_coefficients: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
    """-c_i s_i of DRPO (2510.04474), s_i = mean_j log π_θ, spread over decisions: -c_i log π_θ(a_j)/J_i, `[D]`.

    Its loss weight is 1/(number of all prompts), the rule `constant`.

    Args:
        logprobs: `[D]`.
        score_coefficients: c `[B]` of `groups.drpo_coefficients`.
        lengths: J_i, decisions of each sequence, `[B]`.
    """
    logprobs = widen(logprobs)
    share = (score_coefficients.double() / lengths.clamp(min=1)).to(logprobs.dtype).detach()
    return -repeat(share, offsets, total=logprobs.numel()) * logprobs


def clipping_bias_surrogate(result: PolicyLoss, log_ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """1{clipped} w A log π_θ `[D]`, whose weighted sum has the gradient C that clipping removes (2511.20718).

    ‖C‖ is the global gradient norm of that sum, hence costs a backward pass of its own; `clipping_bias_bound` needs
    none.

    Args:
        result: of `ppo_clip` (s_ppo) or of a turn loss copied to decisions (st_ppo), masks `[D]`.
        log_ratio: log w `[D]`; in st_ppo that of the decision's turn.
        advantages, logprobs: `[D]`.
    """
    check_same_shape(clipped=result.clipped, log_ratio=log_ratio, advantages=advantages, logprobs=logprobs)
    weight = bounded_exp(log_ratio.detach()) * advantages.detach()
    return torch.where(result.clipped, weight * widen(logprobs), 0.0)


@torch.no_grad()
def clipping_bias_bound(
    result: PolicyLoss, log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, weights: Tensor
) -> Tensor:
    """Σ_j weight_j 1{clipped} w_j |A_j| √2 (1 - π_θ(a_j)), float64 scalar, in place of ‖C‖₂ of 2511.20718.

    ‖∂log π(a)/∂logits‖ <= √2 (1 - π(a)), so by the triangle inequality this bounds the norm of C with respect to the
    *logits*. It differs from the norm with respect to the parameters by the Jacobian of the logits, which takes a
    backward pass, and by leaving out that terms cancel.

    Args:
        weights: loss weights `[D]` of `aggregation`; the rest as for `clipping_bias_surrogate`.
    """
    check_same_shape(
        clipped=result.clipped, log_ratio=log_ratio, advantages=advantages, logprobs=logprobs, weights=weights
    )
    score_norm = math.sqrt(2) * -torch.expm1(widen(logprobs).clamp(max=0))
    terms = weights * bounded_exp(log_ratio) * advantages.abs() * score_norm
    return torch.where(result.clipped, terms, 0.0).double().sum()


def clipping_bias_divisor(norm: Tensor) -> Tensor:
    """max(1, ‖C‖), by which s_ppo and st_ppo divide the update.

    2511.20718 divides by ‖C‖; its treatment of ‖C‖ -> 0 is uncertain, and the floor at 1 is a choice made here.
    """
    return norm.clamp(min=1.0)
