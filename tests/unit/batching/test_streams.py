"""The invariants of `megatron_rl.batching.streams`, against loops over one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_rl.batching import actor_stream, critic_stream, decision_offsets
from megatron_rl.errors import RolloutError
from tests.unit.batching.ragged import Ragged, ragged_batches


def actor_by_loop(batch: Ragged) -> tuple[list[int], list[int], list[int]]:
    """reads, labels and route rows, one token at a time: position t is read if token t+1 of its sequence is sampled."""
    reads, labels, route_rows, slot = [], [], [], 0
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        for t in range(start, stop):
            read = t + 1 < stop and bool(batch.action_mask[t + 1])
            reads.append(slot if read else -1)
            labels.append(int(batch.tokens[t + 1]) if read else -1)
            route_rows.append(int(t - start) if t + 1 < stop else -1)
            slot += read
    return reads, labels, route_rows


@given(ragged_batches())
def test_actor_reads_each_decision_at_the_token_before_it(batch):
    stream = batch.actor()
    reads, labels, route_rows = actor_by_loop(batch)
    assert stream.reads.tolist() == reads
    assert stream.labels.tolist() == labels
    assert stream.route_rows.tolist() == route_rows
    assert [slot for slot in reads if slot >= 0] == list(range(stream.slots))
    assert stream.slots == batch.action_mask.sum()


@given(ragged_batches())
def test_critic_reads_decisions_then_one_boundary_value_of_each_truncated_sequence(batch):
    stream, (raw_reads, _, raw_routes) = batch.critic(), actor_by_loop(batch)
    decisions = int(batch.action_mask.sum())
    tokens, reads, route_rows = [], [], []
    for b, truncated in enumerate(batch.truncated):
        raw = slice(batch.offsets[b], batch.offsets[b + 1])
        boundary = batch.boundary_tokens[batch.boundary_offsets[b] : batch.boundary_offsets[b + 1]]
        tokens += [*batch.tokens[raw].tolist(), *boundary.tolist()]
        reads += [*raw_reads[raw], *[-1] * len(boundary)]
        route_rows += [*raw_routes[raw], *[-1] * len(boundary)]
        assert reads[-1] == -1
        reads[-1] = decisions + b if truncated else -1
        assert stream.offsets[b + 1] == len(tokens)
    assert stream.tokens.tolist() == tokens
    assert stream.reads.tolist() == reads
    assert stream.route_rows.tolist() == route_rows
    assert stream.labels.tolist() == [-1] * len(tokens)
    assert stream.slots == decisions + len(batch.truncated)


@given(ragged_batches())
def test_dtypes_are_the_declared_ones(batch):
    for stream in (batch.actor(), batch.critic()):
        assert (stream.tokens.dtype, stream.labels.dtype) == (np.int32, np.int32)
        assert {a.dtype for a in (stream.offsets, stream.reads, stream.route_rows)} == {np.dtype(np.int64)}


@given(ragged_batches())
def test_decision_offsets_count_sampled_tokens(batch):
    offsets = decision_offsets(batch.action_mask, batch.offsets)
    for b in range(len(batch.truncated)):
        sampled = batch.action_mask[batch.offsets[b] : batch.offsets[b + 1]].sum()
        assert offsets[b + 1] - offsets[b] == sampled
    assert offsets[0] == 0 and len(offsets) == len(batch.offsets)


def test_a_hand_made_trajectory():
    """Prompt 10 11, sampled 12 13, observation 14, sampled 15; truncated with 16 newly visible."""
    columns = (np.arange(10, 16), np.array([0, 6]), np.array([0, 0, 1, 1, 0, 1], bool))
    actor = actor_stream(*columns)
    assert actor.reads.tolist() == [-1, 0, 1, -1, 2, -1]
    assert actor.labels.tolist() == [-1, 12, 13, -1, 15, -1]
    critic = critic_stream(*columns, np.array([16]), np.array([0, 1]), np.array([True]))
    assert critic.tokens.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert critic.reads.tolist() == [-1, 0, 1, -1, 2, -1, 3]
    assert critic.route_rows.tolist() == [0, 1, 2, 3, 4, -1, -1]


def test_a_sampled_first_token_is_refused_and_named():
    with pytest.raises(RolloutError, match=r"row=1, field=action_mask"):
        actor_stream(np.arange(4), np.array([0, 2, 4]), np.array([0, 1, 1, 0], bool))


def test_a_truncated_sequence_without_tokens_is_refused_and_named():
    empty = np.empty(0, np.int32)
    with pytest.raises(RolloutError, match=r"row=0, field=tokens"):
        critic_stream(empty, np.array([0, 0]), empty.astype(bool), empty, np.array([0, 0]), np.array([True]))
