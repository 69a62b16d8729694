"""Importance correction between the policy that sampled (μ) and the proximal policy of the trainer (π_old).

ρ = π_old/μ; `log_ratio` is log ρ `[D]`. Every weight is detached. Decisions about sequences take a `segment_sum`, so
that they are the same on every rank that holds a part. Keep-masks *remove* (before counting); zero weights do not
(they keep the denominator). Sums meant for a reduction over ranks are float64 tensors `[2]` or `[3]`: add them, then
call `ratio`, `effective_sample_size`.
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
    """min(ρ, C), in log space: token TIS for log ρ `[D]`, sequence or turn IS for summed log-ratios `[S]`.

    Log-ratios are bounded to [-20, 20] like everywhere; a `cap` above exp(20) is therefore exp(20).
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
    """IcePop: ρ where α <= ρ <= β, else 0. `[D]`. A weight of zero keeps the decision in the denominator."""
    ratio = bounded_exp(log_ratio)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def keep_tokens(log_ratio: Tensor, estimator: str, maximum: float, minimum: float = -math.inf) -> Tensor:
    """Rejection per decision: bool `[D]`, minimum <= k(-log ρ) <= maximum.

    Args:
        estimator: "k1", "k2" or "k3" of d = -log ρ; only k1 can be negative, hence `minimum`.
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
    """Rejection per sequence on the mean of an estimator over its decisions: bool `[B]`; an empty one has mean 0."""
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
    """Rejection per sequence on its largest (and smallest) estimate: bool `[B]`, true for an empty one."""
    return segment_all(keep_tokens(log_ratio, estimator, maximum, minimum), offsets)


@torch.no_grad()
def veto(log_ratio: Tensor, offsets: Tensor, floor: float) -> Tensor:
    """Which sequences have no ρ below `floor`: bool `[B]`. Compared in log space, so a floor below exp(-20) works."""
    return segment_all(widen(log_ratio) >= math.log(floor), offsets)


def staleness(versions: Tensor, train_version: int) -> Tensor:
    """Updates between sampling and training, int64 `[D]`: a trajectory can span weight versions."""
    return train_version - versions.long()


@torch.no_grad()
def keep_by_staleness(
    versions: Tensor,
    train_version: int,
    maximum: int,
    offsets: Tensor,
    rule: Literal["drop", "mask", "keep"],
) -> Tensor:
    """Which decisions stay, bool `[D]`; the others are removed before counting.

    Args:
        versions: weight version that sampled each decision, int `[D]`.
        maximum: updates that a decision may be old.
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
    """(Σ share·ω, Σ share), float64 `[2]`: the mean that self-normalisation divides by, once reduced over ranks.

    Args:
        weights: ω, `[B]` for sequence rules, `[D]` for token rules.
        shares: keep-mask of the sequences (bool `[B]`), or loss weights w `[D]`; None: all count once. Weights of
            share 0 are not looked at.
    """
    shares = torch.ones_like(weights, dtype=torch.float64) if shares is None else shares.double()
    check_same_shape(weights=weights, shares=shares)
    return torch.stack((torch.where(shares == 0, 0.0, shares * weights.double()).sum(), shares.sum()))


@torch.no_grad()
def self_normalise(weights: Tensor, mean: Tensor) -> Tensor:
    """ω / mean(ω), with the global mean (`ratio` of the reduced `weighted_mean_sums`); zeros if the mean is 0."""
    mean = torch.as_tensor(mean, device=weights.device).to(weights.dtype)
    return torch.where(mean == 0, 0.0, weights / torch.where(mean == 0, 1.0, mean))


def ratio(sums: Tensor) -> Tensor:
    """numerator / denominator of reduced sums `[..., 2]`; 0 where the denominator is 0."""
    numerator, denominator = sums.unbind(-1)
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))


@torch.no_grad()
def sample_size_sums(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """(Σω, Σω², n), float64 `[3]`, over the kept weights.

    Report apart for raw, truncated and kept weights; never mix tokens and sequences.
    """
    weights = (weights if keep is None else weights[keep]).double()
    return torch.stack((weights.sum(), weights.square().sum(), weights.new_tensor(float(weights.numel()))))


def effective_sample_size(sums: Tensor) -> tuple[Tensor, Tensor]:
    """(ESS, ESS/n) of reduced `sample_size_sums`: ESS = (Σω)²/Σω²; 0 when all weights are zero or there are none."""
    total, squares, count = sums.unbind(-1)
    size = ratio(torch.stack((total.square(), squares), dim=-1))
    return size, size / count.clamp(min=1)
