"""GAE against a loop over decisions, and what follows from its definition."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.objectives import advantages as adv
from megatron_rl.objectives.numerics import merge_moments, moments
from megatron_rl.objectives.recurrence import discounted_suffix_sums
from megatron_rl.objectives.segments import repeat
from tests.unit.objectives.timelines import offsets_of

LENGTHS = st.lists(st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 128, 200, 4200])), min_size=1, max_size=6)


def slow_gae(rewards, values, offsets, gamma, lam, bootstrap):
    """One decision at a time, from the last to the first."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(offsets) - 1):
        following, value = 0.0, float(bootstrap[b])
        for j in range(int(offsets[b + 1]) - 1, int(offsets[b]) - 1, -1):
            delta = float(rewards[j]) + gamma * value - float(values[j])
            following = delta + gamma * float(lam[b]) * following
            advantages[j], value = following, float(values[j])
    return advantages


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.booleans(), st.integers(0, 99))
def test_gae_equals_the_loop(lengths, lam, per_sequence, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    rewards, values = torch.randn(2, int(offsets[-1]), generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    lams = torch.full((len(lengths),), lam, dtype=torch.float64)
    if per_sequence:
        lams *= torch.linspace(0, 1, len(lengths), dtype=torch.float64)
    a, g = adv.gae(
        rewards,
        values,
        offsets,
        gamma=0.99,
        lam_actor=lams if per_sequence else lam,
        lam_critic=1.0,
        bootstrap=bootstrap,
    )
    torch.testing.assert_close(a, slow_gae(rewards, values, offsets, 0.99, lams, bootstrap), rtol=1e-11, atol=1e-11)
    monte_carlo = slow_gae(rewards, values, offsets, 0.99, torch.ones(len(lengths)), bootstrap) + values
    torch.testing.assert_close(g, monte_carlo, rtol=1e-11, atol=1e-11)


def test_a_hundred_thousand_decisions_and_one():
    offsets = offsets_of([100_000, 1])
    rewards = torch.zeros(100_001)
    rewards[-2], rewards[-1] = 1.0, 2.0
    a, g = adv.gae(rewards, rewards * 0, offsets, gamma=1.0, lam_actor=1.0, bootstrap=torch.zeros(2))
    assert torch.equal(a, g)
    assert torch.equal(g, torch.cat((torch.ones(100_000), torch.tensor([2.0]))))


def test_no_decisions():
    empty = torch.zeros(0)
    a, g = adv.gae(empty, empty, torch.tensor([0, 0, 0]), gamma=1.0, lam_actor=0.9, bootstrap=torch.ones(2))
    assert a.shape == g.shape == (0,)


@pytest.mark.parametrize("lam", [0.9, torch.tensor([0.9, 0.5, 0.9])])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_sequence_leaves_its_neighbours_alone(lam, poison):
    offsets = offsets_of([70, 70, 70])
    rewards, values = torch.randn(2, 210)
    clean, _ = adv.gae(rewards, values, offsets, gamma=1.0, lam_actor=lam, bootstrap=torch.zeros(3))
    rewards[70:140] = poison
    found, _ = adv.gae(rewards, values, offsets, gamma=1.0, lam_actor=lam, bootstrap=torch.zeros(3))
    keep = torch.ones(210, dtype=torch.bool)
    keep[70:140] = False
    assert torch.equal(found[keep], clean[keep])


def test_float32_product_is_not_done_in_a_shorter_format():
    x, offsets = torch.randn(5000), torch.tensor([0, 5000])
    exact = discounted_suffix_sums(x.double(), 0.999, offsets)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = discounted_suffix_sums(x, 0.999, offsets)
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6


def test_gae_is_much_faster_than_a_loop_over_time():
    """The benchmark in tools/bench/gae.py gives the ratio; here only that no loop over time is left."""
    steps = 20_000
    rewards, values = torch.randn(2, 4 * steps)
    offsets = torch.arange(0, 4 * steps + 1, steps)
    start = time.process_time()
    adv.gae(rewards, values, offsets, gamma=1.0, lam_actor=0.95, bootstrap=torch.zeros(4))
    ours = time.process_time() - start
    start, following = time.process_time(), torch.zeros(4)
    for t in range(steps // 10):
        following = rewards[t :: 4 * steps] + 0.95 * following
    assert ours < (time.process_time() - start) * 10


def test_bad_shapes_are_refused():
    x = torch.zeros(3)
    with pytest.raises(RolloutError, match="values"):
        adv.gae(x, torch.zeros(1), torch.tensor([0, 3]), gamma=1.0, lam_actor=1.0, bootstrap=torch.zeros(1))
    with pytest.raises(RolloutError, match="bootstrap"):
        adv.gae(x, x, torch.tensor([0, 3]), gamma=1.0, lam_actor=1.0, bootstrap=torch.zeros(2))
    for offsets in ([0, 2], [1, 3], [0, 4, 3]):
        with pytest.raises(RolloutError, match="offsets"):
            adv.gae(x, x, torch.tensor(offsets), gamma=1.0, lam_actor=1.0, bootstrap=torch.zeros(len(offsets) - 1))


def test_turn_gae_with_one_decision_per_turn_is_gae():
    rewards, values = torch.randn(2, 9, dtype=torch.float64)
    offsets, bootstrap = torch.tensor([0, 4, 4, 9]), torch.randn(3, dtype=torch.float64)
    settings_ = {"gamma": 0.97, "lam_actor": 0.9, "lam_critic": 0.8, "bootstrap": bootstrap}
    found = adv.turn_gae(rewards, values, torch.arange(10), offsets, **settings_)
    for a, b in zip(found, adv.gae(rewards, values, offsets, **settings_), strict=True):
        assert torch.equal(a, b)


def test_turn_gae_ignores_values_inside_a_turn():
    rewards, values = torch.randn(2, 6)
    turns, sequences = torch.tensor([0, 2, 6]), torch.tensor([0, 2])
    first = adv.turn_gae(rewards, values, turns, sequences, bootstrap=torch.zeros(1))
    values[[1, 3, 4, 5]] = float("nan")
    second = adv.turn_gae(rewards, values, turns, sequences, bootstrap=torch.zeros(1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_length_adaptive_lambda_keeps_its_horizon_proportional_to_length():
    lengths, gamma, alpha = torch.tensor([0, 1, 100, 1000]), 0.999, 0.05
    lam = adv.length_adaptive_lambda(lengths, gamma, alpha)
    assert lam[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(1 / (1 - gamma * lam[2:]), alpha * lengths[2:].double())
    with pytest.raises(ConfigError):
        adv.length_adaptive_lambda(lengths, 0.0, alpha)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.sampled_from([0.0, 1e3, 1e8]))
def test_moments_do_not_depend_on_the_shards(shards, offset):
    x = offset + 3 * torch.randn(sum(shards), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    merged, whole = merge_moments(moments(part) for part in x.split(shards)), moments(x)
    # A mean near the offset is rounded to the offset's spacing, and each of the n deviations is off by that much.
    spacing = torch.finfo(torch.float64).eps * offset
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 + 8 * spacing * (1 + sum(shards)))


def test_whitening_a_large_common_offset_and_no_variance():
    x = (1e6 + torch.arange(5)).float()
    white = adv.whiten(x)
    torch.testing.assert_close(white.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(white.square().mean(), torch.tensor(1.0), atol=1e-5, rtol=0)
    assert torch.equal(adv.whiten(torch.full((6,), 0.7)), torch.zeros(6))
    assert adv.whiten(torch.zeros(0)).shape == (0,)
    assert adv.whiten(torch.tensor([3.0])).tolist() == [0.0]


def test_kept_moments_never_read_what_is_removed():
    x = torch.tensor([1.0, float("nan"), 3.0])
    assert [float(v) for v in moments(x, torch.tensor([True, False, True]))] == [2.0, 2.0, 2.0]


def test_merging_nothing_is_an_error():
    with pytest.raises(RolloutError):
        merge_moments([])


def test_evpo_switches_where_the_critic_explains_nothing():
    returns = torch.tensor([0.0, 1.0, 2.0])
    for values, uses_critic in ((returns * 0.9, True), (-returns, False)):
        residual = returns - values
        a, _ = adv.evpo(residual, returns, moments(returns), moments(residual))
        assert torch.equal(a, residual if uses_critic else returns - 1)
    same = torch.full((3,), 0.7)
    a, explained = adv.evpo(torch.ones(3), same, moments(same), moments(torch.randn(3)))
    assert explained == 0
    torch.testing.assert_close(a, torch.zeros(3))


def test_evpo_statistics_are_global():
    returns, values = torch.randn(2, 10, dtype=torch.float64)
    residual = returns - values
    whole, _ = adv.evpo(residual, returns, moments(returns), moments(residual))
    merged = [merge_moments(moments(p) for p in x.split([3, 0, 7])) for x in (returns, residual)]
    parts = [adv.evpo(r, g, *merged)[0] for r, g in zip(residual.split([3, 7]), returns.split([3, 7]), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_turn_advantages_reach_every_decision_of_the_turn():
    assert repeat(torch.tensor([1.0, 2.0]), torch.tensor([0, 1, 4])).tolist() == [1.0, 2.0, 2.0, 2.0]


def test_one_whole_block_with_a_lambda_per_sequence_leaves_the_input_alone():
    """A transposed single block is contiguous as it is: written in place, it would be the caller's tensor."""
    x = torch.randn(64, dtype=torch.float64)
    before, offsets = x.clone(), torch.tensor([0, 0, 64])
    found = discounted_suffix_sums(x, torch.tensor([0.0, 0.5], dtype=torch.float64), offsets)
    assert torch.equal(x, before)
    torch.testing.assert_close(found, discounted_suffix_sums(x, 0.5, offsets), rtol=1e-12, atol=1e-12)
