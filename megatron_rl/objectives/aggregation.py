"""Loss weights, by which the mean of an aggregation rule becomes a weighted sum.

Every decision gets a weight w, computed once per optimizer step from counts of the *global* batch. The loss is Σ w ℓ;
gradients are summed over micro-batches and ranks and divided by nothing, so that loss and gradients do not depend on
the layout.

Removed decisions and sequences (rejection, veto, staleness, outcomes, overlong) are not counted; decisions with an
importance weight of 0 are.

| rule | weight of a decision of sequence i |
|---|---|
| token_mean | 1/ΣJ |
| sequence_mean | 1/(B₊ J_i) |
| sequence_sum_mean | 1/B₊ |
| prompt_mean | 1/(P n_p J_i) |
| constant | 1/C |

The turn critic, whose decisions are turns, is `sequence_mean` with turns for decisions: 1/(B₊ K_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.objectives.numerics import check_same_shape, widen
from megatron_rl.objectives.segments import repeat

Rule = Literal["token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant"]


@dataclass(frozen=True)
class GlobalCounts:
    """Counts over all data ranks of one optimizer step, after removal."""

    decisions: int
    """ΣJ_i. If it is 0, no optimizer step is taken."""
    sequences: int
    """B₊: sequences with J_i > 0."""
    prompts: int = 0
    """P: prompts with at least one such sequence. Used by `prompt_mean`."""


def count(lengths: Tensor, prompt_ids: Tensor | None = None) -> tuple[GlobalCounts, Tensor]:
    """Counts of a whole batch: (`GlobalCounts`, n_p `[B]`: sequences with decisions that share sequence i's prompt).

    Args:
        lengths: kept decisions J_i, int64 `[B]`, of the *global* batch.
        prompt_ids: int64 `[B]`; None: every sequence is its own prompt.
    """
    populated = (lengths > 0).long()
    ids = torch.arange(lengths.numel(), device=lengths.device) if prompt_ids is None else prompt_ids
    check_same_shape(lengths=lengths, prompt_ids=ids)
    unique, index = torch.unique(ids, return_inverse=True)
    sizes = populated.new_zeros(unique.numel()).index_add(0, index, populated)
    return GlobalCounts(int(lengths.sum()), int(populated.sum()), int((sizes > 0).sum())), sizes[index]


def sequence_weights(
    rule: Rule,
    lengths: Tensor,
    counts: GlobalCounts,
    *,
    prompt_sizes: Tensor | None = None,
    constant: float | None = None,
) -> Tensor:
    """Weight of each decision of sequence i: float64 `[B]`; 0 for a sequence without decisions.

    Args:
        rule: a row of the table above.
        lengths: J_i, kept decisions of each sequence, int64 `[B]`.
        counts: of the global batch; the policy's or the critic's own.
        prompt_sizes: n_p `[B]`, for `prompt_mean`.
        constant: C > 0, for `constant` (Dr.GRPO: B·L_max; DRPO: number of prompts).
    Raises:
        ConfigError: unknown rule, or the rule's own argument is missing.
    """
    lengths = lengths.double()
    inverse = torch.where(lengths > 0, 1 / lengths.clamp(min=1), 0.0)
    populated = (lengths > 0).double()
    if rule == "token_mean":
        return populated / max(counts.decisions, 1)
    if rule == "sequence_mean":
        return inverse / max(counts.sequences, 1)
    if rule == "sequence_sum_mean":
        return populated / max(counts.sequences, 1)
    if rule == "prompt_mean" and prompt_sizes is not None:
        return inverse / (max(counts.prompts, 1) * prompt_sizes.double().clamp(min=1))
    if rule == "constant" and constant is not None and constant > 0:
        return populated / constant
    raise ConfigError(
        "loss weights cannot be formed",
        found=f"{rule}, prompt_sizes={'given' if prompt_sizes is not None else None}, constant={constant}",
        expected="a known rule; prompt_mean with prompt_sizes; constant with C > 0",
        setting="algorithm.aggregation",
    )


def decision_weights(per_sequence: Tensor, offsets: Tensor, keep: Tensor | None = None) -> Tensor:
    """Loss weights w per decision: float32 `[D]`, 0 where `keep` (bool `[D]`) removes."""
    weights = repeat(per_sequence, offsets).float()
    return weights if keep is None else torch.where(keep, weights, 0.0)


def weighted_sum(losses: Tensor, weights: Tensor, importance: Tensor | None = None) -> Tensor:
    """Σ w ω ℓ, a scalar of the losses' dtype. Entries with w = 0 add nothing to it or its gradient, even if NaN.

    Args:
        losses: ℓ `[D]`, carries gradients.
        weights: loss weights w `[D]`.
        importance: ω `[D]`, detached here; for the policy loss only (after dual clip), never for value, KL or entropy.
    """
    check_same_shape(losses=losses, weights=weights)
    losses, counted = widen(losses), weights != 0
    factor = weights
    if importance is not None:
        check_same_shape(losses=losses, importance=importance)
        factor = weights * torch.where(counted, importance.detach(), 0.0)
    return (torch.where(counted, losses, 0.0) * factor.to(losses.dtype)).sum()
