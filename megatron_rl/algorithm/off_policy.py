"""Between the sampler and the anchor: which decisions are removed, and how much the others weigh (spec §9).

Everything is worked out on whole-step vectors, hence the same on every rank and in every layout. Removal comes before
counting; a weight of zero does not remove.
"""

from __future__ import annotations

import math

import torch

from megatron_rl.config import AlgorithmConfig
from megatron_rl.objectives.importance import (
    effective_sample_size,
    geometric_weights,
    icepop_weights,
    keep_sequences_by_extremes,
    keep_sequences_by_mean,
    keep_tokens,
    product_log_weights,
    ratio,
    sample_size_sums,
    self_normalise,
    truncated_weights,
    veto,
    weighted_mean_sums,
)
from megatron_rl.objectives.numerics import bounded_exp
from megatron_rl.objectives.segments import compact, repeat


def accepted_decisions(
    algorithm: AlgorithmConfig,
    anchor: torch.Tensor,
    behaviour: torch.Tensor,
    offsets: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """bool [D]: `kept` without what rejection and veto remove.

    Args:
        anchor, behaviour: [D] log π_anchor, log μ; read where `kept`.
    """
    if not algorithm.removes_by_ratio:
        return kept
    positions, cut = compact(kept, offsets)
    log_ratio = (anchor - behaviour)[positions].double()
    good = torch.ones_like(log_ratio, dtype=torch.bool)
    if algorithm.rejection is not None:
        good &= _not_rejected(algorithm, log_ratio, cut)
    if algorithm.veto is not None:
        good &= repeat(veto(log_ratio, cut, algorithm.veto), cut)
    return kept.index_put((positions,), good)


def _not_rejected(algorithm: AlgorithmConfig, log_ratio: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    least = -math.inf if algorithm.rejection_min is None else algorithm.rejection_min
    bounds = (algorithm.rejection_estimator, algorithm.rejection_max, least)
    if algorithm.rejection == "token":
        return keep_tokens(log_ratio, *bounds)
    rule = keep_sequences_by_mean if algorithm.rejection == "sequence_mean" else keep_sequences_by_extremes
    return repeat(rule(log_ratio, offsets, *bounds), offsets)


def importance_weights(
    algorithm: AlgorithmConfig,
    anchor: torch.Tensor,
    behaviour: torch.Tensor,
    offsets: torch.Tensor,
    turn_offsets: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """ω [D] that corrects from μ to the anchor, decided on whole sequences; None where no correction is configured.

    Args:
        anchor, behaviour: [D] log π_anchor, log μ.
        offsets, turn_offsets: int64 [B+1] and [K+1] into decisions.
        weights: [D] loss weights; 0 outside the step and where removed.

    Returns:
        (ω or None, effective sample sizes as shares of tokens, sequences or turns).
    """
    if not algorithm.is_corrected:
        return None, {}
    log_ratio = torch.where(weights != 0, anchor - behaviour, 0.0)
    if algorithm.token_is_cap is not None:
        raw, omega = bounded_exp(log_ratio), truncated_weights(log_ratio, algorithm.token_is_cap)
        return _per_token(algorithm, raw, omega, weights)
    if algorithm.icepop is not None:
        return _per_token(algorithm, bounded_exp(log_ratio), icepop_weights(log_ratio, *algorithm.icepop), weights)
    if algorithm.turn_is_cap is not None:
        return _per_segment(algorithm, log_ratio, turn_offsets, weights, "turn", algorithm.turn_is_cap)
    cap = algorithm.sequence_is_cap if algorithm.sequence_is_cap is not None else algorithm.geometric_is_cap
    return _per_segment(algorithm, log_ratio, offsets, weights, "sequence", cap)


def _per_token(algorithm: AlgorithmConfig, raw: torch.Tensor, omega: torch.Tensor, weights: torch.Tensor):
    counted = weights != 0
    metrics = {"is/token_ess": _share(omega, counted), "is/token_ess_raw": _share(raw, counted)}
    if algorithm.is_normalise:
        omega = self_normalise(omega, ratio(weighted_mean_sums(omega, weights)))
    return omega, metrics


def _per_segment(
    algorithm: AlgorithmConfig, log_ratio: torch.Tensor, offsets, weights: torch.Tensor, unit: str, cap: float
):
    """One weight a sequence or turn: the product of ρ or its geometric mean, truncated; removed decisions do not count
    in either."""
    positions, cut = compact(weights != 0, offsets)
    present = cut.diff() > 0
    kept = log_ratio.double()[positions]
    geometric = algorithm.geometric_is_cap is not None or (unit == "turn" and algorithm.turn_is_mean)
    summed = geometric_weights(kept, cut).log() if geometric else product_log_weights(kept, cut)
    per_segment = truncated_weights(summed, cap)
    capped = (per_segment >= cap * (1 - 1e-6))[present].double().mean()
    metrics = {
        f"is/{unit}_ess": _share(per_segment, present),
        f"is/{unit}_ess_raw": _share(bounded_exp(summed), present),
        f"is/{unit}_capped": float(capped),
    }
    if algorithm.is_normalise:
        per_segment = self_normalise(per_segment, ratio(weighted_mean_sums(per_segment, present)))
    return repeat(per_segment, offsets).float(), metrics


def _share(omega: torch.Tensor, counted: torch.Tensor) -> float:
    """ESS/n over what is counted."""
    return float(effective_sample_size(sample_size_sums(omega, counted))[1])


def removal_metrics(before: torch.Tensor, after: torch.Tensor, anchor, behaviour) -> dict[str, float]:
    """How much of a step was removed, and the effective share of its tokens before and after."""
    raw = bounded_exp((anchor - behaviour).double())
    removed = 1.0 - float(after.sum()) / max(float(before.sum()), 1.0)
    return {
        "removed/share": removed,
        "removed/token_ess_before": _share(raw, before),
        "removed/token_ess_kept": _share(raw, after),
    }
