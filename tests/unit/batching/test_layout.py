"""The invariants of `megatron_rl.batching.layout`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching import (
    PAD_SEGMENT,
    CostModel,
    actor_stream,
    build_layout,
    context_positions,
    padded_length,
    plan_micro_batches,
    sequence_slice,
)
from megatron_rl.errors import ConfigError
from tests.unit.batching.ragged import ragged_batches

sizes = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))


def layout_of(batch, cp, tp, spare, pad_each_to=None):
    """All sequences in reverse order in one micro-batch with `spare` divisors of trailing padding."""
    stream = batch.actor()
    rows = list(range(len(batch.truncated)))[::-1]
    divisor = 2 * cp * tp if cp > 1 else tp
    needed = sum(pad_each_to or padded_length(int(n), cp) for n in stream.lengths)
    length = (-(-needed // divisor) + spare) * divisor
    return stream, build_layout(stream, rows, length=length, cp=cp, tp=tp, pad_each_to=pad_each_to)


def zigzag_by_loop(cu_seqlens, cp, rank):
    """Positions of one context rank, a chunk at a time."""
    held = []
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        segment = list(range(start, stop))
        chunk = len(segment) // (2 * cp)
        for c in (rank, 2 * cp - 1 - rank):
            held += segment[c * chunk : (c + 1) * chunk]
    return held


@given(ragged_batches(), sizes, st.integers(1, 40), st.sampled_from([None, 24, 32]))
def test_sequences_lie_whole_and_in_order_and_all_else_is_padding(batch, cp_tp, spare, pad_each_to):
    cp, tp = cp_tp
    stream, layout = layout_of(batch, cp, tp, spare, pad_each_to)
    source, position = [], []
    for row in layout.rows:
        raw = list(range(stream.offsets[row], stream.offsets[row + 1]))
        size = pad_each_to or -(-len(raw) // (2 * cp)) * 2 * cp if cp > 1 else pad_each_to or len(raw)
        source += raw + [-1] * (size - len(raw))
        position += range(size)
    assert layout.source[: len(source)].tolist() == source
    assert layout.position[: len(position)].tolist() == position
    assert np.all(layout.source[len(source) :] == -1)
    assert layout.cu_seqlens[len(layout.rows)] == len(source)


@given(ragged_batches(), sizes, st.integers(1, 40))
def test_segments_tile_the_micro_batch_and_divide(batch, cp_tp, spare):
    cp, tp = cp_tp
    _, layout = layout_of(batch, cp, tp, spare)
    multiple = 2 * cp if cp > 1 else 1
    lengths = np.diff(layout.cu_seqlens)
    assert layout.cu_seqlens.dtype == np.int32
    assert layout.cu_seqlens[0] == 0 and layout.cu_seqlens[-1] == layout.length
    assert np.all(lengths > 0) and np.all(lengths % multiple == 0) and layout.length % (multiple * tp) == 0
    assert np.all(lengths[len(layout.rows) :] <= -(-PAD_SEGMENT // multiple) * multiple)
    assert layout.position.tolist() == [p for n in lengths for p in range(n)]


@given(ragged_batches(), sizes)
def test_labels_are_the_next_token_and_padding_reads_nothing(batch, cp_tp):
    stream, layout = layout_of(batch, *cp_tp, spare=2)
    tokens, reads, labels = layout.tokens(stream, pad_id=0), layout.reads(stream), layout.labels(stream)
    read = np.flatnonzero(reads >= 0)
    assert sorted(reads[read]) == list(range(stream.slots))
    assert np.array_equal(labels[read], tokens[read + 1])
    assert np.array_equal(layout.position[read] + 1, layout.position[read + 1])
    assert np.all(labels[reads < 0] == -1)
    pads = layout.source < 0
    assert np.all(tokens[pads] == 0) and np.all(reads[pads] == -1) and np.all(layout.route_rows(stream)[pads] == -1)


@given(ragged_batches(), sizes)
def test_route_rows_are_positions_of_fed_tokens(batch, cp_tp):
    stream, layout = layout_of(batch, *cp_tp, spare=1)
    rows, last = layout.route_rows(stream), set(stream.offsets[1:] - 1)
    for s in np.flatnonzero(layout.source >= 0):
        assert rows[s] == (-1 if layout.source[s] in last else layout.position[s])


@given(ragged_batches(), sizes, st.integers(1, 5))
def test_context_shards_and_sequence_slices_are_partitions(batch, cp_tp, spare):
    cp, tp = cp_tp
    _, layout = layout_of(batch, cp, tp, spare)
    shards = [context_positions(layout.cu_seqlens, cp, rank) for rank in range(cp)]
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(layout.length))
    for rank, shard in enumerate(shards):
        assert len(shard) == layout.length // cp
        if cp > 1:
            assert shard.tolist() == zigzag_by_loop(layout.cu_seqlens.tolist(), cp, rank)
        slices = [np.arange(len(shard))[sequence_slice(len(shard), tp, t)] for t in range(tp)]
        assert np.array_equal(np.concatenate(slices), np.arange(len(shard)))
        assert len({len(part) for part in slices}) == 1


@settings(max_examples=60)
@given(ragged_batches(max_sequences=8), sizes, st.sampled_from([1, 2, 3]), st.sampled_from([None, 32]), st.booleans())
def test_gather_then_scatter_over_shards_is_the_identity(batch, cp_tp, data_ranks, pad_each_to, critic):
    """Every rank computes f(token, position) on its shard; scattering by slot gives f read at every decision."""
    cp, tp = cp_tp
    stream = batch.critic() if critic else batch.actor()
    plan = plan_micro_batches(
        stream.lengths, token_budget=48, data_ranks=data_ranks, cp=cp, tp=tp, cost=CostModel(), pad_each_to=pad_each_to
    )
    result, times_written = np.full(stream.slots, np.nan), np.zeros(stream.slots, int)
    for rows in (rows for rank in plan.assignment for rows in rank):
        layout = build_layout(stream, rows, length=plan.length, cp=cp, tp=tp, pad_each_to=pad_each_to)
        computed, reads = layout.tokens(stream) * 1000.0 + layout.position, layout.reads(stream)
        for cp_rank in range(cp):
            shard = context_positions(layout.cu_seqlens, cp, cp_rank)
            for tp_rank in range(tp):
                held = shard[sequence_slice(len(shard), tp, tp_rank)]
                held = held[reads[held] >= 0]
                result[reads[held]] = computed[held]
                times_written[reads[held]] += 1
    for b, start in enumerate(stream.offsets[:-1]):
        for t in range(start, stream.offsets[b + 1]):
            if stream.reads[t] >= 0:
                assert result[stream.reads[t]] == stream.tokens[t] * 1000.0 + t - start
    read = np.zeros(stream.slots, int)
    read[stream.reads[stream.reads >= 0]] = 1
    assert np.array_equal(times_written, read)


def test_an_empty_micro_batch_is_all_padding():
    stream = actor_stream(np.arange(3), np.array([0, 3]), np.array([0, 1, 1], bool))
    layout = build_layout(stream, (), length=400, cp=2, tp=2)
    assert np.all(layout.source == -1) and np.all(layout.reads(stream) == -1)
    assert np.diff(layout.cu_seqlens).tolist() == [128, 128, 128, 16]


def test_a_common_padded_length_gives_a_grid():
    stream = actor_stream(np.arange(1, 8), np.array([0, 3, 7]), np.zeros(7, bool))
    layout = build_layout(stream, (1, 0), length=16, cp=1, tp=2, pad_each_to=8)
    assert layout.tokens(stream).reshape(2, 8).tolist() == [[4, 5, 6, 7, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert layout.position.reshape(2, 8).tolist() == [list(range(8))] * 2


@pytest.mark.parametrize(
    ("length", "pad_each_to", "setting"),
    [(12, None, "batching.token_budget"), (4, None, "batching.token_budget"), (0, None, "batching.token_budget")]
    + [(16, 6, "batching.packed"), (16, 4, "batching.packed")],
)
def test_lengths_that_do_not_divide_or_hold_are_refused(length, pad_each_to, setting):
    stream = actor_stream(np.arange(5), np.array([0, 5]), np.zeros(5, bool))
    with pytest.raises(ConfigError) as caught:
        build_layout(stream, [0], length=length, cp=2, tp=2, pad_each_to=pad_each_to)
    assert caught.value.setting == setting


def test_shards_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4"):
        context_positions(np.array([0, 4, 10]), cp=2, rank=0)
    with pytest.raises(ConfigError, match="multiple of 2"):
        sequence_slice(5, tp=2, rank=0)
