"""Rules decided outside a loss: adaptive KL, overlong filter, staleness, turn critic, end of pretraining."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.objectives import aggregation, divergence, importance, rewards, value
from megatron_rl.objectives.advantages import turn_gae

OFFSETS = torch.tensor([0, 3, 3, 5])
VERSIONS = torch.tensor([7, 5, 7, 6, 7])


def test_adaptive_kl_holds_where_the_target_is_met_and_moves_towards_it():
    at = lambda kl: divergence.adaptive_kl_coefficient(0.1, kl, target=6.0, gain=0.1)  # noqa: E731
    assert at(6.0) == 0.1
    assert at(6.6) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert at(60.0) == at(1e9) == at(math.inf) == at(math.nan) == pytest.approx(0.1 * 1.02)
    assert at(0.0) == pytest.approx(0.1 * 0.98)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 10), st.floats(0, 1e6), st.floats(0.01, 1))
def test_adaptive_kl_is_never_negative(coefficient, kl, gain):
    assert divergence.adaptive_kl_coefficient(coefficient, kl, 1.0, gain) >= 0


def test_adaptive_kl_reaches_its_target_in_closed_loop():
    """Against a policy whose KL is 1/β: the fixed point is β = 1/target."""
    coefficient = 10.0
    for _ in range(400):
        coefficient = divergence.adaptive_kl_coefficient(coefficient, 1 / coefficient, 0.5, 1.0)
    assert coefficient == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("bad", [(-1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (1.0, 1.0, 1.1)])
def test_adaptive_kl_refuses_nonsense(bad):
    coefficient, target, gain = bad
    with pytest.raises(ConfigError, match=r"reference_kl\.target"):
        divergence.adaptive_kl_coefficient(coefficient, 1.0, target, gain)


def test_overlong_filter_spares_the_critic_where_the_boundary_is_known():
    overlong, known = torch.tensor([False, True, True]), torch.tensor([False, True, False])
    policy, critic = rewards.overlong_filter(overlong, known)
    assert policy.tolist() == [True, False, False]
    assert critic.tolist() == [True, True, False]
    with pytest.raises(RolloutError):
        rewards.overlong_filter(overlong, known[:1])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("drop", [False] * 3 + [True] * 2), ("mask", [True, False, True, True, True]), ("keep", [True] * 5)],
)
def test_staleness_rules(rule, expected):
    assert importance.keep_by_staleness(VERSIONS, 7, 1, OFFSETS, rule).tolist() == expected


def test_a_stale_decision_on_another_rank_drops_the_whole_sequence():
    own, elsewhere = torch.full((5,), 7), torch.tensor([6])
    assert importance.keep_by_staleness(own, 7, 0, OFFSETS, "drop").all()
    keep = importance.keep_by_staleness(torch.cat((own, elsewhere)), 7, 0, torch.tensor([0, 3, 3, 6]), "drop")
    assert keep.tolist() == [True] * 3 + [False] * 3


def test_unknown_staleness_rule_is_refused():
    with pytest.raises(ConfigError, match="staleness"):
        importance.keep_by_staleness(VERSIONS, 7, 1, OFFSETS, "forget")


def test_turn_critic_learns_at_first_decisions_with_every_trajectory_equal():
    """Loss and gradient against a loop over trajectories and turns."""
    turns, sequences = torch.tensor([0, 2, 3, 6, 7]), torch.tensor([0, 3, 4])
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    earned = torch.randn(7, dtype=torch.float64)
    _, targets = turn_gae(earned, values.detach(), turns, sequences, bootstrap=torch.zeros(2))
    counts, _ = aggregation.count(sequences.diff())
    per_sequence = aggregation.sequence_weights("sequence_mean", sequences.diff(), counts)
    weights = value.place_on_first_decisions(aggregation.decision_weights(per_sequence, sequences), turns)
    returns = value.place_on_first_decisions(targets, turns)
    loss = aggregation.weighted_sum(value.value_loss(values, returns)[0], weights)
    (found,) = torch.autograd.grad(loss, values)
    slow = values.new_zeros(())
    for first, last in ((0, 3), (3, 4)):
        errors = [0.5 * (values[int(turns[k])] - targets[k]) ** 2 for k in range(first, last)]
        slow = slow + sum(errors) / len(errors) / 2
    (expected,) = torch.autograd.grad(slow, values)
    torch.testing.assert_close(loss, slow, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert (found != 0).nonzero().flatten().tolist() == [0, 2, 3, 6]


def test_a_target_per_turn_is_needed():
    with pytest.raises(RolloutError, match="per_turn"):
        value.place_on_first_decisions(torch.zeros(3), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("explained", "stops"),
    [
        ([], False),
        ([0.9, 0.9, 0.9], False),
        ([0.1, 0.2, 0.3, 0.4, 0.5], False),
        ([0.1, 0.5, 0.505, 0.5, 0.49], True),
        ([0.5, 0.4, 0.4, 0.52], False),
        ([0.1, math.nan, math.nan, math.nan], True),
        ([-3.0, -2.0, -1.0, 0.0], False),
    ],
)
def test_pretraining_ends_when_explained_variance_rises_no_more(explained, stops):
    assert value.stopped_rising(explained, patience=3, least_gain=0.01) == stops
