"""Reductions over ranks: sums, and one flat vector of what a forward reads that every rank holds.

A forward yields a few floats per decision, which are small beside tokens, activations and weights. The parts that
ranks read are therefore summed into one vector with a slot per decision: exactly one context-parallel rank of one
replica reads a slot, all others add 0. Whitening, loss weights, sequence ratios and effective sample sizes are then
plain functions of whole-batch vectors, with the same bits on every rank.

Process groups are arguments; nothing here depends on a model or a configuration.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_over(tensor: torch.Tensor, *groups: dist.ProcessGroup) -> torch.Tensor:
    """Sum `tensor` in place over each group in turn, skipping groups of one; returns it."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def gather_slots(
    slots: torch.Tensor,
    values: torch.Tensor,
    total: int,
    *,
    data_group: dist.ProcessGroup,
    pipeline_group: dist.ProcessGroup,
    has_values: bool,
) -> torch.Tensor:
    """One flat vector of all slots from the parts that ranks of the last pipeline stage read.

    Args:
        slots: int64 [n], slots this rank read.
        values: float32 or float64 [c, n], the c quantities it read at each of them.
        total: number of slots.
        data_group: data- and context-parallel ranks of a stage.
        pipeline_group: ranks of the pipeline stages; only the last one's values are used.
        has_values: whether this rank is on the last stage.

    Returns:
        [c, total], the same on every rank; 0 where no rank read a slot.
    """
    out = values.new_zeros((values.shape[0], total))
    if has_values:
        out[:, slots] = values
        sum_over(out, data_group)
    return from_last(out, pipeline_group)


def from_last(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Broadcast the last rank's `tensor` to all ranks of a group, in place; returns it."""
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, group.size() - 1), group=group)
    return tensor
