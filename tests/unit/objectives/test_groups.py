"""Group baselines against Python lists; degenerate groups; DRPO and VPO."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RolloutError
from megatron_rl.objectives import groups

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.7, -2.5]), st.sampled_from([3, 8, 9]), st.booleans()),
    min_size=1,
    max_size=12,
)


def columns(rows):
    rewards, ids, included = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), torch.tensor(included)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_baselines_equal_the_definition(rows):
    rewards, ids, included = columns(rows)
    for i, (reward, group, counts) in enumerate(rows):
        members = [r for r, g, c in rows if g == group and c]
        grpo = dr = 0.0
        if counts and max(members) > min(members):
            dr = reward - statistics.fmean(members)
            grpo = dr / (statistics.pstdev(members) + 1e-6)
        assert float(groups.dr_grpo(rewards, ids, included)[i]) == pytest.approx(dr, abs=1e-12)
        assert float(groups.grpo(rewards, ids, included)[i]) == pytest.approx(grpo, abs=1e-9)
        varied = counts and max(members) > min(members)
        assert bool(groups.dynamic_sampling_keep(rewards, ids, included)[i]) == varied


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_leave_one_out_equals_the_definition_or_refuses(rows):
    rewards, ids, included = columns(rows)
    members = {g: [r for r, h, c in rows if h == g and c] for _, g, _ in rows}
    if any(len(m) == 1 for m in members.values()):
        with pytest.raises(RolloutError, match="leave-one-out"):
            groups.rloo(rewards, ids, included)
        return
    found = groups.rloo(rewards, ids, included)
    for i, (reward, group, counts) in enumerate(rows):
        m = members[group]
        expected = reward - (sum(m) - reward) / (len(m) - 1) if counts else 0.0
        assert float(found[i]) == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_give_exactly_zero_even_without_epsilon():
    rewards, ids = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert rewards.sum() / 3 != 0.1
    for found in (groups.grpo(rewards, ids, eps=0.0), groups.dr_grpo(rewards, ids), groups.rloo(rewards, ids)):
        assert torch.equal(found, torch.zeros(3, dtype=torch.float64))
    assert not groups.dynamic_sampling_keep(rewards, ids).any()


def test_excluded_rewards_are_not_looked_at():
    rewards, ids = torch.tensor([0.0, 1.0, float("nan")]), torch.zeros(3, dtype=torch.int64)
    included = torch.tensor([True, True, False])
    for function in (groups.grpo, groups.dr_grpo, groups.rloo):
        found = function(rewards, ids, included)
        assert torch.isfinite(found).all()
        assert found[2] == 0
    assert groups.batch_mean_baseline(rewards, included).tolist() == [-0.5, 0.5, 0.0]


def test_no_responses_at_all():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for function in (groups.grpo, groups.dr_grpo, groups.rloo, groups.dynamic_sampling_keep):
        assert function(empty, ids).shape == (0,)
    assert groups.batch_mean_baseline(empty).shape == (0,)
    drpo = groups.drpo_coefficients(empty, ids.bool(), ids, ids, max_length=10)
    assert drpo.score.shape == (0,)
    assert drpo.prompts == 0


def test_drpo_coefficients_are_the_gradient_of_the_objective():
    scores = torch.randn(7, dtype=torch.float64, requires_grad=True)
    correct = torch.tensor([True, False, True, True, False, True, True])
    ids, lengths = torch.tensor([5, 5, 5, 1, 1, 2, 2]), torch.tensor([10, 20, 30, 40, 50, 60, 70])
    found = groups.drpo_coefficients(scores.detach(), correct, lengths, ids, max_length=100, lam=0.5, tau=2.0)
    total = scores.new_zeros(())
    for group in (5, 1):
        own = ids == group
        weights = torch.softmax((1 - lengths[own & correct].double() / 100) / 0.5, 0)
        negatives = torch.logsumexp(scores[own & ~correct] / 2.0, 0)
        objective = (weights * scores[own & correct]).sum() - 2.0 * negatives
        torch.testing.assert_close(found.objective[own], objective.detach().expand(int(own.sum())))
        total = total + objective
    (gradient,) = torch.autograd.grad(total, scores)
    torch.testing.assert_close(found.score, gradient)
    assert found.prompts == 3
    assert found.score[5:].tolist() == [0.0, 0.0]


def test_drpo_survives_extreme_scores():
    scores = torch.tensor([-1e4, -1e4, -1e4, -2e4])
    correct = torch.tensor([True, True, False, False])
    ids = torch.zeros(4, dtype=torch.int64)
    found = groups.drpo_coefficients(scores, correct, torch.tensor([1, 10**6, 5, 5]), ids, max_length=10, tau=0.1)
    assert torch.isfinite(found.score).all()
    assert found.positive_weights.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found.score[2:].tolist() == [-1.0, 0.0]


def test_drpo_constraint_is_one_sided():
    assert groups.drpo_kl_coefficient(torch.tensor(5e-5)) == 0
    torch.testing.assert_close(groups.drpo_kl_coefficient(torch.tensor(1.1e-3)), torch.tensor(1.0))


def test_set_rewards_of_ragged_answer_sets():
    answers = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    weights = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    found = groups.set_rewards(answers, torch.tensor([0, 2, 3]), weights)
    torch.testing.assert_close(found, torch.tensor([0.85, 0.5], dtype=torch.float64))
    with pytest.raises(RolloutError, match="row=1"):
        groups.set_rewards(answers, torch.tensor([0, 3, 3]), weights)


def test_dirichlet_draws_are_reproducible_points_of_the_simplex():
    draws = groups.dirichlet_draws(4000, 3, torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws.sum(-1), torch.ones(4000).double())
    torch.testing.assert_close(draws.mean(0), torch.full((3,), 1 / 3).double(), atol=0.02, rtol=0)
    assert torch.equal(draws, groups.dirichlet_draws(4000, 3, torch.Generator().manual_seed(1)))
