"""A rank's own part of every micro-batch: its tokens, what it reads, and the routes of its layers and tokens only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.backend import platform
from megatron_rl.backend.attention import PackedAttentionParams, packed_params
from megatron_rl.backend.replay import MISSING, RouterRows
from megatron_rl.backend.topology import Topology
from megatron_rl.batching import (
    MicroBatchPlan,
    PackLayout,
    TokenStream,
    build_layout,
    context_positions,
    sequence_slice,
)
from megatron_rl.rollouts.routes import missing_sentinel, padding_rows

RouteSource = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(row of the batch, MoE layer indices [l], route rows [r]) → ids [l, r, k] as recorded, sentinel included."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of this rank needs. s = S/cp tokens of its context shard, t = s/tp of its sequence shard."""

    tokens: torch.Tensor
    """int64 [1, s]."""
    positions: torch.Tensor
    """int64 [1, s], inside each segment."""
    attention: PackedAttentionParams
    read_at: torch.Tensor
    """int64 [n]: places of the context shard that something is read from."""
    slots: torch.Tensor
    """int64 [n]: the flat slots read there."""
    labels: torch.Tensor
    """int64 [n]: tokens whose log-probs are read; -1 for a critic."""
    router: RouterRows


@dataclass(frozen=True)
class RouteSpec:
    """What replay needs to know of a model and a batch."""

    source: RouteSource | None
    """None: route natively."""
    layers: dict[int, int]
    """This rank's 0-based decoder layers → index of the recorded MoE layer."""
    experts: int
    topk: int


def prepare_micro_batches(
    stream: TokenStream,
    plan: MicroBatchPlan,
    topology: Topology,
    routes: RouteSpec,
    *,
    pad_each_to: int | None = None,
    aux_weight: float | None = None,
) -> list[MicroBatch]:
    """Cut this rank's share out of a plan.

    Args:
        stream: what the model is fed.
        plan: who computes what; this rank takes its data rank's micro-batches.
        topology: this rank's place.
        routes: recorded routes of this rank's layers; only the bytes of its layers and tokens are touched.
        pad_each_to: as in `build_layout`.
        aux_weight: weight of each recorded token in the router losses, or None without them.
    """
    layout = topology.config
    return [
        _cut(
            stream,
            build_layout(
                stream, rows, length=plan.length, cp=layout.context, tp=layout.tensor, pad_each_to=pad_each_to
            ),
            topology,
            routes,
            aux_weight,
        )
        for rows in plan.assignment[topology.dp_rank]
    ]


def _cut(stream, layout: PackLayout, topology: Topology, routes: RouteSpec, aux_weight: float | None) -> MicroBatch:
    cp, device = topology.config.context, platform.device()
    mine = context_positions(layout.cu_seqlens, cp, topology.cp_rank)
    reads = layout.reads(stream)[mine]
    read_at = np.flatnonzero(reads >= 0)
    tensor = lambda array: torch.as_tensor(array.astype(np.int64), device=device)  # noqa: E731
    return MicroBatch(
        tokens=tensor(layout.tokens(stream)[mine])[None],
        positions=tensor(layout.position[mine])[None],
        attention=packed_params(layout.cu_seqlens, cp, topology.cp_rank, device),
        read_at=tensor(read_at),
        slots=tensor(reads[read_at]),
        labels=tensor(layout.labels(stream)[mine][read_at]),
        router=_router_rows(stream, layout, topology, routes, mine, aux_weight),
    )


def _router_rows(stream, layout: PackLayout, topology: Topology, routes: RouteSpec, mine, aux_weight) -> RouterRows:
    device = platform.device()
    part = mine[sequence_slice(len(mine), topology.config.tensor, topology.tp_rank)]
    rows = layout.route_rows(stream)[part]
    real = torch.as_tensor(rows >= 0, device=device)
    weights = None if aux_weight is None else real.to(torch.float32) * aux_weight
    if routes.source is None:
        return RouterRows(None, real, weights)
    segment = np.searchsorted(layout.cu_seqlens[1:], part, side="right")
    filler = padding_rows(len(part), routes.experts, routes.topk, start=int(part[0]) if len(part) else 0)
    indices = np.array(list(routes.layers.values()), np.int64)
    ids = np.repeat(filler.astype(np.int64)[None], len(indices), 0)
    for place, row in enumerate(layout.rows):
        here = np.flatnonzero((segment == place) & (rows >= 0))
        if len(here):
            ids[:, here] = _as_ids(routes.source(row, indices, rows[here]))
    stacked = torch.as_tensor(ids, device=device)
    return RouterRows(dict(zip(routes.layers, stacked, strict=True)), real, weights)


def _as_ids(recorded: np.ndarray) -> np.ndarray:
    return np.where(recorded == missing_sentinel(recorded.dtype), MISSING, recorded.astype(np.int64))
