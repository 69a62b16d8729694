"""Packed, context-parallel attention against dense attention under one explicit mask."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.backend.attention import PackedCausalAttention, packed_params
from megatron_rl.batching import context_positions

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SEGMENTS = {
    "ragged": (4, 16, 8, 12, 4, 24),
    "one": (16,),
    "equal": (8, 8, 8),
    "short and long": (4, 4, 4, 64),
}
"""Padded segment lengths, multiples of 4 so that two context ranks can share them."""


def inputs(total: int) -> tuple[torch.Tensor, ...]:
    """Query, key, value and the weights of the loss, float64 [t, heads, d]."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (HEADS * WIDTH,))
    return tuple(torch.randn(total, *size, generator=generator, dtype=torch.float64) for size in sizes)


def packed(lengths: tuple[int, ...]) -> tuple[np.ndarray, list[torch.Tensor]]:
    """This rank's positions, and its output and gradients there."""
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cp, rank = dist.get_world_size(), dist.get_rank()
    mine = context_positions(boundaries, cp, rank)
    *qkv, weights = (x[mine] for x in inputs(int(boundaries[-1])))
    qkv = [x.requires_grad_() for x in qkv]
    group = SimpleNamespace(cp=dist.group.WORLD)
    attention = PackedCausalAttention(None, 1, None, None, softmax_scale=0.3, pg_collection=group)
    params = packed_params(boundaries, cp, rank, torch.device("cpu"))
    output = attention(*qkv, packed_seq_params=params)
    (output * weights).sum().backward()
    return mine, [output.detach(), *(x.grad for x in qkv)]


def dense(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """The same by a masked softmax over all positions at once."""
    total = sum(lengths)
    *qkv, weights = inputs(total)
    query, key, value = (x.requires_grad_() for x in qkv)
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (segment[:, None] == segment[None]) & torch.ones(total, total, dtype=torch.bool).tril()
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query, repeated[0]) * 0.3
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    output = torch.einsum("hqk,khd->qhd", shares, repeated[1]).flatten(1)
    (output * weights).sum().backward()
    return [output.detach(), query.grad, key.grad, value.grad]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("name", SEGMENTS)
def test_equals_dense_attention(ranks, cp: int, name: str) -> None:
    expected = dense(SEGMENTS[name])
    covered = []
    for mine, found in ranks.run(packed, cp, SEGMENTS[name]):
        covered += mine.tolist()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[mine], rtol=1e-12, atol=1e-12)
    assert sorted(covered) == list(range(sum(SEGMENTS[name])))


def test_scale_defaults_to_that_of_the_head_width(ranks) -> None:
    """Megatron passes no scale: 1/√d is meant."""
    assert ranks.run(default_scale, 1) == [True]


def default_scale() -> bool:
    """Whether no scale equals 1/√d."""
    boundaries = np.array([0, 8], np.int32)
    *qkv, _ = inputs(8)
    params = packed_params(boundaries, 1, 0, torch.device("cpu"))
    outputs = [
        PackedCausalAttention(None, 1, None, None, softmax_scale=s, pg_collection=SimpleNamespace(cp=dist.group.WORLD))(
            *qkv, packed_seq_params=params
        )
        for s in (None, WIDTH**-0.5)
    ]
    return torch.allclose(*outputs, rtol=1e-12)
