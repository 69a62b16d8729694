"""The position of every token of one micro-batch: one index map for tokens, labels, routes, masks and results.

Axis S is the padded micro-batch. Context parallelism of size `cp` cuts each segment into zigzag chunks (S/cp tokens a
rank); sequence parallelism of size `tp` cuts such a shard into contiguous slices (S/cp/tp tokens a rank).

Invariants:

* Each sequence of `rows` appears once, whole and in order, at the start of one segment; all else is padding (-1).
* Every segment's length is a multiple of 2·cp (of 1 when cp is 1); S is a multiple of 2·cp·tp (of tp when cp is 1).
* Segments tile [0, S): the sequences' first, in the order of `rows`, then padding-only ones, none longer than
  PAD_SEGMENT rounded up to that multiple.
* The context shards of all ranks are a partition of [0, S); so are the sequence slices of [0, S/cp).
* Gathering a stream's values onto the micro-batches of a plan and scattering the shards back by slot is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_rl.batching.streams import TokenStream
from megatron_rl.errors import ConfigError

_N = TypeVar("_N", int, np.ndarray)

PAD_SEGMENT = 128
"""Padding-only segments are about this long at most, tokens: attention over a segment of n costs n²."""


@dataclass(frozen=True, eq=False)
class PackLayout:
    """The index map of one micro-batch. Index arrays are over the padded micro-batch `[S]`."""

    rows: tuple[int, ...]
    """Sequences of the batch, in packing order; empty for an all-padding micro-batch."""
    length: int
    """S, common to all micro-batches of a step."""
    cu_seqlens: np.ndarray
    """int32 [n+1]: padded segment boundaries from 0 to S; segment i < len(rows) holds sequence rows[i]."""
    source: np.ndarray
    """int64 [S]: index into the stream's flat arrays, -1 at padding."""
    position: np.ndarray
    """int64 [S]: position inside the segment, continuing over the padding that follows a sequence."""

    def gather(self, values: np.ndarray, fill: float) -> np.ndarray:
        """`values` [T', …] of the stream at each position, `fill` at padding: [S, …] of the same dtype."""
        out = np.full((self.length, *values.shape[1:]), fill, values.dtype)
        real = self.source >= 0
        out[real] = values[self.source[real]]
        return out

    def tokens(self, stream: TokenStream, pad_id: int = 0) -> np.ndarray:
        """int32 [S], `pad_id` at padding."""
        return self.gather(stream.tokens, pad_id)

    def reads(self, stream: TokenStream) -> np.ndarray:
        """int64 [S]: slot read at each position, -1 for none."""
        return self.gather(stream.reads, -1)

    def labels(self, stream: TokenStream) -> np.ndarray:
        """int32 [S]: token whose log-prob is read at each position, -1 for none."""
        return self.gather(stream.labels, -1)

    def route_rows(self, stream: TokenStream) -> np.ndarray:
        """int64 [S]: row of the recorded routes of the segment's trajectory, -1 where none exists."""
        return self.gather(stream.route_rows, -1)


def segment_multiple(cp: int) -> int:
    """What divides every segment's length: 2·cp, so that zigzag chunks are equal; 1 without context parallelism."""
    return 2 * cp if cp > 1 else 1


def length_multiple(cp: int, tp: int) -> int:
    """What divides a micro-batch's length, so that every context shard splits evenly over `tp` ranks."""
    return segment_multiple(cp) * tp


def round_up(n: _N, multiple: int) -> _N:
    """Smallest multiple of `multiple` that is at least n, an integer or an array of integers."""
    return -(-n // multiple) * multiple


def padded_length(n: int, cp: int) -> int:
    """Tokens that a sequence of n tokens takes in a micro-batch: n rounded up to `segment_multiple(cp)`."""
    return round_up(n, segment_multiple(cp))


def build_layout(
    stream: TokenStream,
    rows: Sequence[int] | np.ndarray,
    *,
    length: int,
    cp: int,
    tp: int,
    pad_each_to: int | None = None,
) -> PackLayout:
    """Lay sequences one after another, each padded to a multiple of 2·cp, and fill up to `length` with padding.

    Args:
        stream: the sequences' tokens and reads.
        rows: sequences of this micro-batch, in packing order; may be empty.
        length: S, tokens.
        cp, tp: context- and tensor-parallel sizes.
        pad_each_to: pad every sequence to this many tokens instead. The micro-batch is then a `[b, pad_each_to]` grid
            if `length` is a multiple of it.

    Raises:
        ConfigError: `length` or `pad_each_to` is not such a multiple, or is too short.
    """
    rows = tuple(int(row) for row in rows)
    counts = stream.lengths[np.asarray(rows, np.int64)]
    sizes = segment_lengths(counts, cp, pad_each_to)
    _check_length(length, int(sizes.sum()), cp, tp)
    boundaries = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    source = np.full(length, -1, np.int64)
    for row, start, count in zip(rows, boundaries[:-1], counts, strict=True):
        source[start : start + count] = stream.offsets[row] + np.arange(count)
    boundaries = np.concatenate([boundaries, _padding_boundaries(int(boundaries[-1]), length, cp)])
    position = np.arange(length) - np.repeat(boundaries[:-1], np.diff(boundaries))
    return PackLayout(rows, length, boundaries.astype(np.int32), source, position)


def segment_lengths(lengths: np.ndarray, cp: int, pad_each_to: int | None = None) -> np.ndarray:
    """int64 [n]: padded tokens of each sequence, `lengths` being its raw tokens.

    Raises:
        ConfigError: `pad_each_to` is not a multiple of 2·cp (cp > 1) or is shorter than a sequence.
    """
    lengths = np.asarray(lengths, np.int64)
    if pad_each_to is None:
        return round_up(lengths, segment_multiple(cp))
    longest = int(lengths.max(initial=0))
    if pad_each_to % segment_multiple(cp) or pad_each_to < longest:
        raise ConfigError(
            "the common padded length does not suit these sequences",
            found=pad_each_to,
            expected=f"a multiple of {segment_multiple(cp)}, at least the longest sequence's {longest} tokens",
            setting="batching.packed",
        )
    return np.full(len(lengths), pad_each_to, np.int64)


def context_positions(cu_seqlens: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """int64 [S/cp]: positions of the micro-batch that context rank `rank` holds, in the order it holds them.

    Each segment is cut into 2·cp chunks; rank r holds chunk r, then chunk 2·cp-1-r, so that all ranks have as much
    causal attention to compute.

    Args:
        cu_seqlens: int [n+1], as in `PackLayout`.
        cp: context-parallel size.
        rank: in [0, cp).

    Raises:
        ConfigError: a segment is not a multiple of 2·cp.
    """
    starts, sizes = np.asarray(cu_seqlens[:-1], np.int64), np.diff(cu_seqlens).astype(np.int64)
    if cp == 1:
        return np.arange(int(cu_seqlens[-1]))
    if np.any(sizes % (2 * cp)):
        raise ConfigError(
            "a segment does not split into zigzag chunks",
            found=f"{int(sizes[sizes % (2 * cp) > 0][0])} tokens",
            expected=f"a multiple of {2 * cp}",
        )
    local, chunk = sizes // cp, sizes // (2 * cp)
    within = np.arange(int(local.sum())) - np.repeat(np.cumsum(local) - local, local)
    chunk, starts = np.repeat(chunk, local), np.repeat(starts, local)
    mirrored = (2 * cp - 1 - rank) * chunk + within - chunk
    return starts + np.where(within < chunk, rank * chunk + within, mirrored)


def sequence_slice(n: int, tp: int, rank: int) -> slice:
    """The contiguous part of a context shard of n tokens that sequence-parallel rank `rank` of `tp` holds.

    Raises:
        ConfigError: n is not a multiple of tp.
    """
    if n % tp:
        raise ConfigError("a context shard does not split over tensor ranks", found=n, expected=f"a multiple of {tp}")
    return slice(rank * (n // tp), (rank + 1) * (n // tp))


def _padding_boundaries(start: int, stop: int, cp: int) -> np.ndarray:
    """Ends of the padding-only segments that fill [start, stop)."""
    step = padded_length(PAD_SEGMENT, cp)
    return np.append(np.arange(start + step, stop, step), stop) if stop > start else np.empty(0, np.int64)


def _check_length(length: int, needed: int, cp: int, tp: int) -> None:
    multiple = length_multiple(cp, tp)
    if length <= 0 or length % multiple or length < needed:
        raise ConfigError(
            "the micro-batch length does not suit its sequences",
            found=length,
            expected=f"a positive multiple of {multiple}, at least {needed} tokens",
            setting="batching.token_budget",
        )
