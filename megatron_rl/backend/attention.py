"""Packed, context-parallel causal attention for machines without Transformer Engine.

Megatron's local attention supports neither packed (THD) sequences nor context parallelism. This one gathers keys and
values over the context-parallel group and runs `scaled_dot_product_attention` on buckets of segments of similar length.
The index tensors of a micro-batch (`attention_plan`) are computed once, not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from megatron_rl.backend import platform
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
    first: torch.Tensor
    """int64 [n]: position of each block's first query in its segment, whose first key is key 0."""


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
        tensor(np.array([first - start for start, first, _ in group], np.int64)),
    )


class PackedCausalAttention(torch.nn.Module):
    """Drop-in `core_attention` of Megatron's layer spec for packed micro-batches.

    Forward: query [t, Hq, d], key [t, Hkv, d] and value [t, Hkv, e] of this context-parallel rank → [t, Hq·e]. Scores
    are formed and normalised by `scaled_dot_product_attention`; tokens of other segments are never seen.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **_
    ):
        super().__init__()
        self.scale, self.group = softmax_scale, pg_collection.cp
        self.window = self.softmax_offset = None

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params: PackedAttentionParams, **_):
        """See the class."""
        if self.group.size() > 1:
            gathered = gather_from_sequence_parallel_region(torch.cat((key, value), 2), group=self.group)
            key, value = gathered.split((key.shape[2], value.shape[2]), 2)
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
        mask = bucket.mask
        if self.window is not None or self.softmax_offset is not None:
            mask = self._mask(bucket, q.shape[2], k.shape[2])
            if self.softmax_offset is not None:
                # The sink is a zero key with a zero value: its logit is the mask's entry alone.
                k, v = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid)

    def _mask(self, bucket: AttentionBucket, queries: int, keys: int) -> torch.Tensor:
        """Additive mask [n, 1 or H, queries, keys (+ 1 with sinks)]: a token sees itself and `window` before it."""
        at = torch.arange(keys, device=bucket.first.device)
        # Padding queries stand at the last key, so that no row is empty.
        position = (bucket.first[:, None] + torch.arange(queries, device=at.device)).clamp(max=keys - 1)[:, :, None]
        seen = at <= position
        if self.window is not None:
            seen = seen & (at >= position - self.window)
        dtype = torch.float32 if self.softmax_offset is None else self.softmax_offset.dtype
        mask = torch.where(seen, 0.0, -torch.inf).to(dtype)[:, None]
        if self.softmax_offset is None:
            return mask
        shape = (len(mask), len(self.softmax_offset), queries)
        return torch.cat((mask.expand(*shape, keys), self.softmax_offset[None, :, None, None].expand(*shape, 1)), 3)


class SinkAttention(PackedCausalAttention):
    """The same with sliding windows and sinks (gpt-oss).

    Layers of Megatron's `window_size` see that many tokens back. With `softmax_type="learnable"` a learned logit per
    head, `softmax_offset` [heads / TP], takes its share of every softmax.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **_
    ):
        super().__init__(config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            offset = torch.zeros(heads, dtype=config.params_dtype, device=platform.device_of_new_parameters(config))
            self.softmax_offset = torch.nn.Parameter(offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Sinks are cut over tensor-parallel ranks with their heads."""
        states, cut = self.state_dict(keep_vars=True), {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(states, prefix, cut, sharded_offsets)
