"""Sums, means and copies over the segments (sequences or turns) of a flat timeline.

Segment i is `[offsets[i], offsets[i+1])` with `offsets` int64 `[S+1]`; empty segments are allowed everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.errors import RolloutError
from megatron_rl.objectives.numerics import widen


def local_segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each segment: `[D]` or `[D, n]` -> `[S]` or `[S, n]`, 0 for an empty one; differentiable.

    Accumulates in float64 and in a fixed order; returns at least float32 (float64 for bool and integers).
    """
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, initial=0.0)
    return sums.to(widen(values).dtype) if values.is_floating_point() else sums


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each segment, `[D]` -> `[S]`; 0 for an empty segment."""
    values = widen(values)
    sums, counts = local_segment_sum(torch.stack((values, torch.ones_like(values)), dim=-1), offsets).unbind(-1)
    return sums / counts.clamp(min=1)


def segment_all(mask: Tensor, offsets: Tensor) -> Tensor:
    """Whether `mask` (bool `[D]`) holds everywhere in each segment: bool `[S]`, true for an empty one."""
    return local_segment_sum((~mask).double(), offsets) == 0


def repeat(per_segment: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Copy a value per segment to each of its entries: `[S]` -> `[D]`, differentiable.

    Args:
        total: D, if the caller knows it; saves a device synchronisation.
    Raises:
        RolloutError: `per_segment` and `offsets` disagree on S.
    """
    if per_segment.shape[0] != offsets.numel() - 1:
        raise RolloutError(
            "a value per segment is needed", found=per_segment.shape[0], expected=f"{offsets.numel() - 1} segments"
        )
    return torch.repeat_interleave(per_segment, offsets.diff(), dim=0, output_size=total)


def last_positions(offsets: Tensor) -> Tensor:
    """Position of the last entry of each *non-empty* segment, int64, ascending."""
    return offsets[1:][offsets.diff() > 0] - 1


def compact(keep: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Remove entries from a timeline: (positions int64 `[D']` of the kept ones, their offsets `[S+1]`).

    Values are removed by indexing with `positions` and not by a product with a mask, since 0·NaN is NaN in the sum and
    in the gradient.
    """
    counts = torch.cat((keep.new_zeros(1, dtype=torch.int64), keep.long().cumsum(0)))
    return keep.nonzero().squeeze(-1), counts[offsets]


def check_offsets(offsets: Tensor, total: int, field: str = "offsets") -> None:
    """Raise `RolloutError` unless `offsets` is int64 `[S+1]`, starts at 0, never falls and ends at `total`."""
    if offsets.dim() != 1 or offsets.numel() == 0 or offsets.dtype != torch.int64:
        raise RolloutError(
            "offsets of a timeline",
            field=field,
            found=f"{offsets.dtype} {tuple(offsets.shape)}",
            expected="int64 [S+1]",
        )
    if offsets[0] != 0 or offsets[-1] != total or bool((offsets.diff() < 0).any()):
        raise RolloutError(
            "offsets do not cut the timeline",
            field=field,
            found=f"{int(offsets[0])}..{int(offsets[-1])}",
            expected=f"ascending, 0..{total}",
        )
