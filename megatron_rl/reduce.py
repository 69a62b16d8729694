"""Every collective that is ours. Groups are arguments; nothing here knows a model or a configuration.

What a forward reads is a few floats per decision, while tokens, activations and weights are large. So each step's
decision-level results are summed into one flat vector that every rank holds (a slot is read by exactly one
context-parallel
rank of one replica, all others add 0). Whitening, loss weights, sequence ratios and effective sample sizes are then
plain functions of whole-batch vectors, the same bits on every rank and in every layout.
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
        slots: int64 [n] slots this rank read.
        values: [c, n] what it read, float32 or float64.
        total: number of slots.
        data_group: data- and context-parallel ranks of a stage.
        pipeline_group: the stages; its last rank holds values.
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
    """Copy the last rank's `tensor` to all ranks of a group, in place; returns it."""
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, group.size() - 1), group=group)
    return tensor
