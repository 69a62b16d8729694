"""Tensor-parallel layouts as four pure functions, for every split rule of `table.Split`.

One fact carries them all: a rank's shard is the merge of that rank's slice of each source. So

* `rank_slices` says which part of a source a rank needs,
* `merge` lays sources side by side (whole sources → whole parameter, a rank's slices → its shard),
* `unmerge` inverts `merge`, and `join` inverts the cut into ranks.

`groups` counts the row groups sources are interleaved by: query groups for `qkv`, 1 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.table import Split


def rank_slices(split: Split, shape: Sequence[int], rank: int, ranks: int, vocab_rows: int = 0) -> tuple[slice, ...]:
    """The part of a source of `shape` that tensor-parallel `rank` of `ranks` holds, one slice per dimension.

    Args:
        vocab_rows: rows per rank under `vocab`, padding included; the slice is clipped to real rows and may be empty.

    Raises:
        CheckpointError: the dimension does not divide by the ranks.
    """
    whole = [slice(0, size) for size in shape]
    if split == "replicated":
        return tuple(whole)
    if split == "vocab":
        whole[0] = slice(min(rank * vocab_rows, shape[0]), min((rank + 1) * vocab_rows, shape[0]))
        return tuple(whole)
    dim = 1 if split == "columns" else 0
    part = exact_share(shape[dim], ranks)
    whole[dim] = slice(rank * part, (rank + 1) * part)
    return tuple(whole)


def exact_share(total: int, ranks: int) -> int:
    """total / ranks.

    Raises:
        CheckpointError: it is not whole.
    """
    if total % ranks:
        raise CheckpointError(
            "a dimension does not divide by the tensor-parallel ranks",
            found=total,
            expected=f"a multiple of {ranks}",
            setting="parallel.tensor or parallel.expert_tensor",
        )
    return total // ranks


def merge(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Interleave sources [rows_i, ...] by row group (group 0 of each, group 1 of each, …) → new [Σ rows_i, ...]."""
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def unmerge(tensor: Tensor, rows: Sequence[int], groups: int) -> list[Tensor]:
    """Invert `merge`: [Σ rows_i, ...] → sources of `rows_i` rows each (views where groups is 1)."""
    grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([count // groups for count in rows], 1)]


def join(split: Split, shards: Sequence[Tensor]) -> Tensor:
    """Tensor-parallel shards in rank order → the whole parameter (padded under `vocab`).

    Raises:
        CheckpointError: replicas differ in some bit.
    """
    if split == "replicated":
        for rank, shard in enumerate(shards):
            if not torch.equal(shard, shards[0]):
                raise CheckpointError(
                    "replicas of a parameter differ", found=f"rank {rank}", expected="rank 0's values"
                )
        return shards[0]
    if split == "glu":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(shards), 1 if split == "columns" else 0)
