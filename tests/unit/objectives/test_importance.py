"""Importance weights, rejection and sample sizes: definitions, extremes, and independence of how a batch is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.objectives import importance
from megatron_rl.objectives.segments import compact, segment_all

OFFSETS = torch.tensor([0, 3, 3, 5])
LOG_RATIOS = torch.tensor([0.1, -2.0, 0.3, 0.7, -0.1])


def test_weights_are_detached():
    x = LOG_RATIOS.clone().requires_grad_()
    results = (
        importance.truncated_weights(x, 2.0),
        importance.product_log_weights(x, OFFSETS),
        importance.geometric_weights(x, OFFSETS),
        importance.icepop_weights(x),
    )
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extremes_are_finite_and_bounded(extreme):
    x = torch.full((100_000,), extreme)
    offsets = torch.tensor([0, 99_999, 100_000, 100_000])
    log_weights = importance.product_log_weights(x, offsets)
    assert torch.isfinite(log_weights).all()
    weights = importance.truncated_weights(log_weights, 5.0)
    expected = 5.0 if extreme > 0 else math.exp(-20)
    torch.testing.assert_close(weights, torch.tensor([expected, expected, 1.0]))
    assert torch.isfinite(importance.geometric_weights(x, offsets)).all()
    assert torch.equal(importance.icepop_weights(x), torch.zeros(100_000))


def test_icepop_keeps_its_bounds():
    ratios = torch.tensor([0.49, 0.5, 1.0, 5.0, 5.01], dtype=torch.float64)
    found = importance.icepop_weights(ratios.log(), 0.5 - 1e-12, 5.0 + 1e-12)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 1.0, 5.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rejection_by_token_mean_and_maximum(estimator):
    d = -LOG_RATIOS.double()
    value = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]
    limit = 0.4
    assert torch.equal(importance.keep_tokens(LOG_RATIOS, estimator, limit), value <= limit)
    means = [float(value[:3].mean()), 0.0, float(value[3:].mean())]
    found = importance.keep_sequences_by_mean(LOG_RATIOS, OFFSETS, estimator, limit)
    assert found.tolist() == [mean <= limit for mean in means]
    highest = importance.keep_sequences_by_extremes(LOG_RATIOS, OFFSETS, estimator, limit)
    assert highest.tolist() == [bool((value[:3] <= limit).all()), True, bool((value[3:] <= limit).all())]


def test_rejection_of_k1_on_both_sides():
    assert importance.keep_tokens(LOG_RATIOS, "k1", 1.0, -0.5).tolist() == [True, False, True, False, True]


def test_rejection_of_extreme_ratios_is_decided_not_nan():
    x = torch.tensor([1e4, -1e4, 0.0])
    for estimator in ("k2", "k3"):
        assert importance.keep_tokens(x, estimator, 10.0).tolist() == [False, False, True]


def test_unknown_estimator_is_a_configuration_error():
    with pytest.raises(ConfigError, match="k4"):
        importance.keep_tokens(LOG_RATIOS, "k4", 1.0)


def test_veto_looks_at_every_decision_of_the_whole_sequence():
    assert importance.veto(LOG_RATIOS, OFFSETS, math.exp(-1.9)).tolist() == [False, True, True]
    assert importance.veto(LOG_RATIOS, OFFSETS, math.exp(-2.1)).tolist() == [True, True, True]
    assert importance.veto(LOG_RATIOS, OFFSETS, 1e-3).tolist() == [True, True, True]
    with_another_rank = torch.cat((LOG_RATIOS, torch.tensor([-8.0]))), torch.tensor([0, 3, 3, 6])
    assert importance.veto(*with_another_rank, 1e-3).tolist() == [True, True, False]
    assert importance.veto(torch.tensor([-50.0, -30.0]), torch.tensor([0, 1, 2]), math.exp(-40)).tolist() == [
        False,
        True,
    ]


def test_staleness_by_token_and_sequence():
    versions = torch.tensor([7, 5, 6, 7, 7], dtype=torch.int32)
    assert importance.staleness(versions, 7).tolist() == [0, 2, 1, 0, 0]
    fresh = importance.keep_by_staleness(versions, 7, 1, OFFSETS, "mask")
    assert fresh.tolist() == [True, False, True, True, True]
    assert segment_all(fresh, OFFSETS).tolist() == [False, True, True]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_effective_sample_size_is_between_one_and_n_and_scale_free(weights):
    w = torch.tensor(weights, dtype=torch.float64)
    size, fraction = importance.effective_sample_size(importance.sample_size_sums(w))
    if float(w.square().sum()) == 0:
        assert size == 0
        return
    assert 1 - 1e-9 <= size <= len(weights) * (1 + 1e-9)
    torch.testing.assert_close(fraction * len(weights), size)
    parts = importance.sample_size_sums(w[:3]) + importance.sample_size_sums(w[3:])
    torch.testing.assert_close(importance.effective_sample_size(parts)[0], size)
    torch.testing.assert_close(importance.effective_sample_size(importance.sample_size_sums(2 * w))[0], size)


def test_all_rejected():
    nobody = torch.zeros(5, dtype=torch.bool)
    weights = importance.truncated_weights(LOG_RATIOS, 2.0)
    assert importance.effective_sample_size(importance.sample_size_sums(weights, nobody))[0] == 0
    mean = importance.ratio(importance.weighted_mean_sums(weights, nobody))
    assert mean == 0
    assert torch.equal(importance.self_normalise(weights, mean), torch.zeros(5))
    positions, offsets = compact(nobody, OFFSETS)
    assert positions.shape == (0,)
    assert offsets.tolist() == [0, 0, 0, 0]


def test_self_normalised_weights_have_the_mean_one():
    weights, loss_weights = torch.rand(5) + 0.1, torch.rand(5)
    mean = importance.ratio(importance.weighted_mean_sums(weights, loss_weights))
    found = importance.self_normalise(weights, mean)
    torch.testing.assert_close((found * loss_weights).sum() / loss_weights.sum(), torch.tensor(1.0))
    keep = torch.tensor([True, True, False, True, False])
    mean = importance.ratio(importance.weighted_mean_sums(weights, keep))
    torch.testing.assert_close(importance.self_normalise(weights, mean)[keep].mean(), torch.tensor(1.0))


def test_removed_weights_are_not_looked_at():
    weights, keep = torch.tensor([1.0, float("nan")]), torch.tensor([True, False])
    assert importance.weighted_mean_sums(weights, keep).tolist() == [1.0, 1.0]
    assert importance.sample_size_sums(weights, keep).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(RolloutError):
        importance.weighted_mean_sums(weights, keep[:1])
