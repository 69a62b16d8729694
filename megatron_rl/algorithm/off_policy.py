"""Between the sampler and the anchor: which decisions are removed, and how much the others weigh (spec §9).

Everything is worked out on whole-step vectors, hence the same on every rank and in every layout. Removal comes before
counting; a weight of zero does not remove.
"""

from __future__ import annotations

import math

import torch

from megatron_rl.config import AlgorithmConfig
from megatron_rl.config.terms import RejectionConfig
from megatron_rl.methods import CorrectionInputs
from megatron_rl.objectives.importance import (
    effective_sample_size,
    keep_sequences_by_extremes,
    keep_sequences_by_mean,
    keep_tokens,
    sample_size_sums,
    veto,
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
        good &= _not_rejected(algorithm.rejection, log_ratio, cut)
    if algorithm.veto is not None:
        good &= repeat(veto(log_ratio, cut, algorithm.veto), cut)
    return kept.index_put((positions,), good)


def _not_rejected(rejection: RejectionConfig, log_ratio: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    least = -math.inf if rejection.min is None else rejection.min
    if rejection.unit == "token":
        return keep_tokens(log_ratio, rejection.estimator, rejection.max, least)
    rule = keep_sequences_by_mean if rejection.unit == "sequence_mean" else keep_sequences_by_extremes
    return repeat(rule(log_ratio, offsets, rejection.estimator, rejection.max, least), offsets)


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
    if not algorithm.importance.corrects:
        return None, {}
    log_ratio = torch.where(weights != 0, anchor - behaviour, 0.0)
    return algorithm.importance.weigh(CorrectionInputs(log_ratio, weights, offsets, turn_offsets))


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
