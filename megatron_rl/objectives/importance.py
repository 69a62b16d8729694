"""Importance correction between the policy that sampled (μ) and the proximal policy of the trainer (π_old).

ρ = π_old/μ; `log_ratio` is log ρ `[D]`. Every weight is detached. Where a keep-mask is False, the decision is removed
before decisions are counted; a decision of weight zero is counted. Functions named `*_sums` return float64 tensors
`[2]` or `[3]` that may be added over parts of a batch before `ratio` or `effective_sample_size` is taken.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.objectives.divergence import estimate
from megatron_rl.objectives.numerics import LOG_RATIO_LIMIT, bounded_exp, check_same_shape, widen
from megatron_rl.objectives.segments import local_segment_sum, repeat, segment_all, segment_mean


@torch.no_grad()
def truncated_weights(log_ratio: Tensor, cap: float) -> Tensor:
    """min(ρ, C): weights of tokens from log ρ `[D]`, of sequences or turns from their summed log-ratios `[S]`.

    Log-ratios are clamped to [-20, 20], so that a `cap` above exp(20) is exp(20).
    """
    return widen(log_ratio).clamp(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, math.log(cap))).exp()


@torch.no_grad()
def product_log_weights(log_ratio: Tensor, offsets: Tensor) -> Tensor:
    """Σ_j log ρ_j per sequence or turn, `[S]`, unbounded; 0 for an empty one. Exponentiate with `truncated_weights`."""
    return local_segment_sum(widen(log_ratio), offsets)


@torch.no_grad()
def geometric_weights(log_ratio: Tensor, offsets: Tensor) -> Tensor:
    """exp(mean_j log ρ_j) per sequence or turn, `[S]`; 1 for an empty one."""
    return bounded_exp(segment_mean(log_ratio, offsets))


@torch.no_grad()
def icepop_weights(log_ratio: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """ρ where `low` <= ρ <= `high`, else 0 (IcePop), `[D]`. A decision of weight zero is still counted."""
    ratio = bounded_exp(log_ratio)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def keep_tokens(log_ratio: Tensor, estimator: str, maximum: float, minimum: float = -math.inf) -> Tensor:
    """Which decisions have minimum <= k(-log ρ) <= maximum: bool `[D]`.

    Args:
        estimator: k, "k1", "k2" or "k3" of `divergence.estimate`; only k1 can be negative, hence `minimum`.
    """
    value = estimate(-widen(log_ratio), estimator)
    return (value >= minimum) & (value <= maximum)


@torch.no_grad()
def keep_sequences_by_mean(
    log_ratio: Tensor,
    offsets: Tensor,
    estimator: str,
    maximum: float,
    minimum: float = -math.inf,
) -> Tensor:
    """Which sequences have a mean of k(-log ρ) within the bounds: bool `[B]`; the mean of an empty one is 0."""
    value = segment_mean(estimate(-widen(log_ratio), estimator), offsets)
    return (value >= minimum) & (value <= maximum)


@torch.no_grad()
def keep_sequences_by_extremes(
    log_ratio: Tensor,
    offsets: Tensor,
    estimator: str,
    maximum: float,
    minimum: float = -math.inf,
) -> Tensor:
    """Which sequences have k(-log ρ) within the bounds at every decision: bool `[B]`, true for an empty one."""
    return segment_all(keep_tokens(log_ratio, estimator, maximum, minimum), offsets)


@torch.no_grad()
def veto(log_ratio: Tensor, offsets: Tensor, floor: float) -> Tensor:
    """Which sequences have no ρ below `floor`: bool `[B]`. Compared as logarithms, hence exact below exp(-20) too."""
    return segment_all(widen(log_ratio) >= math.log(floor), offsets)


def staleness(versions: Tensor, train_version: int) -> Tensor:
    """Weight versions between sampling and training of each decision, int64 `[D]`; a trajectory may span several."""
    return train_version - versions.long()


@torch.no_grad()
def keep_by_staleness(
    versions: Tensor,
    train_version: int,
    maximum: int,
    offsets: Tensor,
    rule: Literal["drop", "mask", "keep"],
) -> Tensor:
    """Which decisions stay, bool `[D]`; the others are to be removed before decisions are counted.

    Args:
        versions: weight version that sampled each decision, int `[D]`.
        maximum: largest `staleness` of a fresh decision.
        rule: `drop` removes every sequence that holds a stale decision, `mask` only the stale decisions, `keep` none.
    Raises:
        ConfigError: unknown rule.
    """
    fresh = staleness(versions, train_version) <= maximum
    if rule == "drop":
        return repeat(segment_all(fresh, offsets), offsets, total=fresh.numel())
    if rule in ("mask", "keep"):
        return fresh if rule == "mask" else torch.ones_like(fresh)
    raise ConfigError(
        "unknown staleness rule", found=rule, expected="drop, mask or keep", setting="algorithm.stale_decisions.rule"
    )


@torch.no_grad()
def weighted_mean_sums(weights: Tensor, shares: Tensor | None = None) -> Tensor:
    """(Σ share·ω, Σ share), float64 `[2]`; their `ratio` is the mean that `self_normalise` divides by.

    Args:
        weights: ω, `[B]` for sequence rules, `[D]` for token rules.
        shares: keep-mask of the sequences (bool `[B]`), or loss weights w `[D]`; None: 1 each. A weight of share 0
            adds nothing, even if it is NaN.
    """
    shares = torch.ones_like(weights, dtype=torch.float64) if shares is None else shares.double()
    check_same_shape(weights=weights, shares=shares)
    return torch.stack((torch.where(shares == 0, 0.0, shares * weights.double()).sum(), shares.sum()))


@torch.no_grad()
def self_normalise(weights: Tensor, mean: Tensor) -> Tensor:
    """ω / mean(ω), with the mean over the global batch (`ratio` of `weighted_mean_sums`); zeros if the mean is 0."""
    mean = torch.as_tensor(mean, device=weights.device).to(weights.dtype)
    return torch.where(mean == 0, 0.0, weights / torch.where(mean == 0, 1.0, mean))


def ratio(sums: Tensor) -> Tensor:
    """numerator / denominator of sums `[..., 2]`; 0 where the denominator is 0."""
    numerator, denominator = sums.unbind(-1)
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))


@torch.no_grad()
def sample_size_sums(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """(Σω, Σω², n), float64 `[3]`, over the kept weights.

    Raw, truncated and kept weights have sample sizes of their own, and so have tokens and sequences: do not add them.
    """
    weights = (weights if keep is None else weights[keep]).double()
    return torch.stack((weights.sum(), weights.square().sum(), weights.new_tensor(float(weights.numel()))))


def effective_sample_size(sums: Tensor) -> tuple[Tensor, Tensor]:
    """(ESS, ESS/n) of `sample_size_sums`, ESS = (Σω)²/Σω² (Kish 1965); 0 if all weights are zero or there are none."""
    total, squares, count = sums.unbind(-1)
    size = ratio(torch.stack((total.square(), squares), dim=-1))
    return size, size / count.clamp(min=1)
