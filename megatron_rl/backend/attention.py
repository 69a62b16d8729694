"""Packed, context-parallel causal attention for machines without Transformer Engine.

Megatron's local attention knows neither packed (THD) sequences nor context parallelism. This one gathers keys and
values
over the context-parallel group and runs `scaled_dot_product_attention` on buckets of segments of similar length.
What goes where is worked out once per micro-batch (`AttentionPlan`), not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_rl.batching.layout import context_positions

_BUCKET_RATIO = 1.3
"""Longest over shortest query block of one bucket: bounds the padding wasted in a batched call."""


@dataclass(frozen=True)
class AttentionBucket:
    """Query blocks attended in one call. n blocks of at most q queries and k keys."""

    queries: torch.Tensor
    """int64 [n, q]: rows of the local query tensor; padded with 0."""
    keys: torch.Tensor
    """int64 [n, k]: rows of the gathered key tensor; padded with 0."""
    mask: torch.Tensor | None
    """bool [n, 1, q, k]: may attend; None where queries and keys are the same rows and plain causal attention is
    meant."""
    valid: torch.Tensor
    """int64: flat positions of [n·q] that are real queries."""
    rows: torch.Tensor
    """int64: local query row of each valid position."""


@dataclass
class PackedAttentionParams(PackedSeqParams):
    """Megatron's packed-sequence parameters plus our plan."""

    plan: tuple[AttentionBucket, ...] = ()


def packed_params(cu_seqlens: np.ndarray, cp: int, rank: int, device: torch.device) -> PackedAttentionParams:
    """Packed-sequence parameters of one micro-batch on one context-parallel rank.

    Args:
        cu_seqlens: int32 [n+1] padded segment boundaries of the whole micro-batch.
        cp, rank: context-parallel size and rank.
    """
    boundaries = torch.as_tensor(cu_seqlens, dtype=torch.int32, device=device)
    longest = int(np.diff(cu_seqlens).max())
    return PackedAttentionParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=attention_plan(cu_seqlens, cp, rank, device),
    )


def attention_plan(cu_seqlens: np.ndarray, cp: int, rank: int, device: torch.device) -> tuple[AttentionBucket, ...]:
    """Buckets of query blocks: one block per segment, or two (zigzag halves) under context parallelism."""
    gathered = np.concatenate([context_positions(cu_seqlens, cp, r) for r in range(cp)])
    where_key = np.empty_like(gathered)
    where_key[gathered] = np.arange(len(gathered))
    local = gathered[rank * (len(gathered) // cp) : (rank + 1) * (len(gathered) // cp)]
    where_query = np.zeros_like(gathered)
    where_query[local] = np.arange(len(local))
    blocks = []
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk = (int(stop) - int(start)) // (2 * cp) if cp > 1 else int(stop) - int(start)
        for part in (rank, 2 * cp - 1 - rank) if cp > 1 else (0,):
            first = int(start) + part * chunk
            blocks.append((int(start), first, first + chunk))
    blocks = sorted((b for b in blocks if b[2] > b[1]), key=lambda b: (b[2] - b[1], b[2] - b[0]))
    return tuple(_bucket(group, where_query, where_key, cp == 1, device) for group in _similar(blocks))


def _similar(blocks: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    groups: list[list[tuple[int, int, int]]] = []
    for block in blocks:
        shortest = groups[-1][0] if groups else None
        fits = shortest and all(
            block[2] - block[i] <= _BUCKET_RATIO * max(shortest[2] - shortest[i], 8) for i in (0, 1)
        )
        groups[-1].append(block) if fits else groups.append([block])
    return groups


def _bucket(group, where_query, where_key, plain: bool, device) -> AttentionBucket:
    most_q = max(stop - first for _, first, stop in group)
    most_k = max(stop - start for start, _, stop in group)
    queries = np.zeros((len(group), most_q), np.int64)
    keys = np.zeros((len(group), most_k), np.int64)
    mask = np.zeros((len(group), 1, most_q, most_k), bool)
    real = np.zeros((len(group), most_q), bool)
    for i, (start, first, stop) in enumerate(group):
        q, k = stop - first, stop - start
        queries[i, :q] = where_query[first:stop]
        keys[i, :k] = where_key[start:stop]
        mask[i, 0, :q, :k] = np.arange(k)[None] <= np.arange(first - start, stop - start)[:, None]
        mask[i, 0, q:, 0] = True
        real[i, :q] = True
    valid = np.flatnonzero(real)
    tensor = lambda array: torch.as_tensor(array, device=device)  # noqa: E731
    return AttentionBucket(
        tensor(queries),
        tensor(keys),
        None if plain else tensor(mask),
        tensor(valid),
        tensor(queries.reshape(-1)[valid]),
    )


class PackedCausalAttention(torch.nn.Module):
    """Drop-in `core_attention` of Megatron's layer spec for packed micro-batches.

    Forward: query [t, Hq, d], key and value [t, Hkv, d] of this context-parallel rank → [t, Hq·d]. Scores are formed
    and normalised by `scaled_dot_product_attention`; tokens of other segments are never seen.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **_
    ):
        super().__init__()
        self.scale, self.group = softmax_scale, pg_collection.cp

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedAttentionParams, **_):
        """See the class."""
        if self.group.size() > 1:
            gathered = gather_from_sequence_parallel_region(torch.stack((key, value), 1), group=self.group)
            key, value = gathered[:, 0], gathered[:, 1]
        outputs = [self._attend(query, key, value, bucket) for bucket in packed_seq_params.plan]
        rows = torch.cat([bucket.rows for bucket in packed_seq_params.plan])
        order = torch.empty_like(rows)
        order[rows] = torch.arange(len(rows), device=rows.device)
        return torch.cat(outputs).index_select(0, order).flatten(1)

    def _attend(self, query, key, value, bucket: AttentionBucket) -> torch.Tensor:
        q = query[bucket.queries].transpose(1, 2)
        k, v = (x[bucket.keys].transpose(1, 2) for x in (key, value))
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=self.scale
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid)
