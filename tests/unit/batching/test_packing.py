"""The invariants of `megatron_rl.batching.packing`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batching import CostModel, padded_length, plan_micro_batches, split_minibatches
from megatron_rl.errors import ConfigError

BUDGET = 30
costs = st.builds(CostModel, linear=st.sampled_from([0.0, 1.0]), quadratic=st.sampled_from([0.0, 0.1, 1.0]))
shapes = st.fixed_dictionaries(
    {
        "data_ranks": st.integers(1, 4),
        "cp": st.sampled_from([1, 2, 4]),
        "tp": st.sampled_from([1, 2]),
        "cost": costs,
        "count_multiple": st.sampled_from([1, 2, 4]),
    }
)
ragged = st.lists(st.integers(1, BUDGET), max_size=24)


def smallest_bin_count(sizes: list[int], capacity: int) -> int:
    """The least number of bins, by trying every place for every item."""

    def fits(left: list[int], bins: list[int]) -> bool:
        if not left:
            return True
        rooms = {room: i for i, room in enumerate(bins) if room >= left[0]}
        return any(fits(left[1:], bins[:i] + [room - left[0]] + bins[i + 1 :]) for room, i in rooms.items())

    sizes = sorted(sizes, reverse=True)
    return next(n for n in itertools.count(0) if fits(sizes, [capacity] * n))


def cheapest_split(values: list[float], ranks: int) -> float:
    """The least possible load of the most loaded rank, over all assignments."""
    loads = []
    for owners in itertools.product(range(ranks), repeat=len(values)):
        loads.append(max(sum(v for v, o in zip(values, owners, strict=True) if o == r) for r in range(ranks)))
    return min(loads)


@given(ragged, shapes, st.data())
def test_every_row_once_equal_counts_and_within_the_budget(lengths, shape, data):
    rows = data.draw(st.none() | st.permutations(range(len(lengths))).map(lambda p: p[: len(p) // 2]))
    pad_each_to = data.draw(st.sampled_from([None, 32])) if max(lengths, default=0) <= 32 else None
    budget = BUDGET if pad_each_to is None else 70
    plan = plan_micro_batches(lengths, token_budget=budget, rows=rows, pad_each_to=pad_each_to, **shape)
    planned = [row for rank in plan.assignment for micro_batch in rank for row in micro_batch]
    assert sorted(planned) == sorted(range(len(lengths)) if rows is None else rows)
    assert len(plan.assignment) == shape["data_ranks"]
    assert {len(rank) for rank in plan.assignment} == {plan.count}
    assert plan.count >= 1 and plan.count % shape["count_multiple"] == 0
    divisor = (2 * shape["cp"] if shape["cp"] > 1 else 1) * shape["tp"]
    assert plan.length % divisor == 0 and 0 < plan.length <= -(-budget // divisor) * divisor
    for rank in plan.assignment:
        for micro_batch in rank:
            assert sum(pad_each_to or padded_length(lengths[row], shape["cp"]) for row in micro_batch) <= plan.length
        prices = [sum(shape["cost"].cost(lengths[row]) for row in micro_batch) for micro_batch in rank]
        assert all(a >= b or a == pytest.approx(b) for a, b in itertools.pairwise(prices))


@settings(max_examples=60)
@given(st.lists(st.integers(1, BUDGET), max_size=9), shapes)
def test_count_is_at_most_twice_the_smallest(lengths, shape):
    plan = plan_micro_batches(lengths, token_budget=BUDGET, **shape)
    divisor = (2 * shape["cp"] if shape["cp"] > 1 else 1) * shape["tp"]
    sizes = [padded_length(n, shape["cp"]) for n in lengths]
    smallest = max(1, -(-smallest_bin_count(sizes, -(-BUDGET // divisor) * divisor) // shape["data_ranks"]))
    multiple = shape["count_multiple"]
    assert plan.count <= -(-2 * smallest // multiple) * multiple


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), costs, st.integers(2, 3))
def test_costliest_rank_is_within_a_third_of_the_optimum(lengths, cost, ranks):
    plan = plan_micro_batches(lengths, token_budget=1000, data_ranks=ranks, cp=1, tp=1, cost=cost)
    loads = [sum(cost.cost(lengths[row]) for micro_batch in rank for row in micro_batch) for rank in plan.assignment]
    assert max(loads) <= (4 / 3) * cheapest_split([cost.cost(n) for n in lengths], ranks) + 1e-9


@given(ragged, shapes)
def test_the_plan_does_not_depend_on_the_order_rows_are_named_in(lengths, shape):
    forward = plan_micro_batches(lengths, token_budget=BUDGET, rows=range(len(lengths)), **shape)
    backward = plan_micro_batches(lengths, token_budget=BUDGET, rows=range(len(lengths))[::-1], **shape)
    assert forward == backward


def test_quadratic_cost_spreads_long_sequences():
    """Eight of 10 equal one of 80 in tokens, not in attention."""
    by_tokens = plan_micro_batches([80, *[10] * 8], token_budget=80, data_ranks=2, cp=1, tp=1, cost=CostModel())
    assert by_tokens.assignment == (((0,),), ((1, 2, 3, 4, 5, 6, 7, 8),))
    long_pair = plan_micro_batches(
        [60, 60, *[20] * 6], token_budget=120, data_ranks=2, cp=1, tp=1, cost=CostModel(0, 1)
    )
    assert [len(set(rank[0]) & {0, 1}) for rank in long_pair.assignment] == [1, 1]


def test_micro_batches_share_tokens_evenly_rather_than_filling_up():
    plan = plan_micro_batches([10] * 9, token_budget=80, data_ranks=1, cp=1, tp=1, cost=CostModel(), count_multiple=3)
    assert (plan.count, plan.length) == (3, 30)


def test_an_even_spread_that_overflows_falls_back_to_a_tight_one():
    """Emptiest-first puts 5+3 and 4+3 and leaves no place for the last 3; 5+4 and 3+3+3 fits."""
    plan = plan_micro_batches([5, 4, 3, 3, 3], token_budget=9, data_ranks=1, cp=1, tp=1, cost=CostModel())
    assert plan.assignment == (((0, 1), (2, 3, 4)),) and plan.length == 9


def test_an_empty_batch_still_has_a_micro_batch_on_every_rank():
    plan = plan_micro_batches([], token_budget=8, data_ranks=2, cp=2, tp=2, cost=CostModel(), count_multiple=2)
    assert plan.assignment == (((), ()), ((), ())) and plan.length == 8


def test_a_sequence_beyond_the_budget_is_named():
    with pytest.raises(ConfigError) as caught:
        plan_micro_batches([3, 17], token_budget=16, data_ranks=1, cp=1, tp=1, cost=CostModel())
    error = caught.value
    assert (error.row, error.found, error.expected) == (1, "17 tokens", "at most 16")
    assert error.setting == "batching.token_budget"


def test_a_common_length_may_use_the_rounded_up_budget():
    plan = plan_micro_batches([14], token_budget=14, data_ranks=1, cp=4, tp=1, cost=CostModel(), pad_each_to=16)
    assert plan.length == 16


def test_a_common_length_beyond_the_budget_is_refused():
    with pytest.raises(ConfigError, match="batching.token_budget"):
        plan_micro_batches([3], token_budget=16, data_ranks=1, cp=1, tp=1, cost=CostModel(), pad_each_to=32)


def test_model_cost_counts_the_matmuls_of_a_layer():
    """A layer with h=6, three query heads and one key/value head of width 2, f=5, counted matmul by matmul."""
    cost = CostModel.for_model(hidden=6, heads=3, kv_heads=1, head_dim=2, active_ffn=5)
    matmuls = [(6, 3 * 2), (6, 1 * 2), (6, 1 * 2), (3 * 2, 6), (6, 5), (6, 5), (5, 6)]
    assert cost.linear == sum(2 * rows * columns for rows, columns in matmuls)
    scores_and_sum = 2 * (2 * 3 * 2)
    assert cost.quadratic == scores_and_sum / 2


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))
def test_minibatches_have_each_row_once_and_even_sizes(num_rows, minibatches, seed, epoch):
    parts = split_minibatches(num_rows, minibatches, seed, epoch)
    assert len(parts) == minibatches
    assert sorted(np.concatenate(parts)) == list(range(num_rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.text(max_size=4), unique=True, min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_named_rows_are_split_alike_in_any_order(keys, random):
    shuffled = random.sample(keys, len(keys))
    named = [[keys[row] for row in part] for part in split_minibatches(len(keys), 3, 1, 2, keys)]
    again = [[shuffled[row] for row in part] for part in split_minibatches(len(keys), 3, 1, 2, shuffled)]
    assert named == again


def test_the_shuffle_changes_with_seed_and_epoch_and_only_then():
    def order(seed, epoch):
        return np.concatenate(split_minibatches(50, 4, seed, epoch)).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(*pair)) for pair in [(1, 2), (2, 1), (1, 3), (0, 0)]}) == 4
    assert order(1, 2) != sorted(order(1, 2))


def test_no_minibatch_is_refused():
    with pytest.raises(ConfigError, match="algorithm.minibatches"):
        split_minibatches(4, 0, 0, 0)
