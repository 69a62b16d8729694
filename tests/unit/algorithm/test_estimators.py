"""Estimators of a scored batch: groups by name, turns by number, λ by length, and what is left out of statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.selection import integer_ids
from megatron_rl.algorithm.timeline import correct_rows, place_all_rewards, timeline
from megatron_rl.batching import decision_offsets
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import RolloutError
from megatron_rl.methods import EstimatorInputs, Timeline
from megatron_rl.methods.estimators import VPO
from tests.reference import methods, plain
from tests.unit.algorithm.batches import batch_of

TURNS = [[2, 1], [], [3], [1, 2, 2], [1], [2]]
GROUPS = ["a", "a", "b", "b", "a", "b"]


def times_of(batch) -> Timeline:
    return timeline(batch, torch.as_tensor(decision_offsets(batch.action_mask, batch.offsets)))


def estimated(algorithm: AlgorithmConfig, batch, rows: list[int], values=None, bootstrap=None, **options):
    times = times_of(batch)
    kept = torch.zeros(len(batch), dtype=torch.bool)
    kept[rows] = True
    kept = kept.repeat_interleave(times.offsets.diff())
    rewards = place_all_rewards(algorithm, batch, times).double()
    inputs = EstimatorInputs(batch, times, rewards, kept, algorithm.gamma, values, bootstrap, **options)
    return algorithm.estimator.estimate(inputs), times


def test_turns_begin_where_their_number_changes_and_at_each_trajectory() -> None:
    times = times_of(batch_of(TURNS, [0.0] * 6, GROUPS))
    assert times.offsets.tolist() == [0, 3, 3, 6, 11, 12, 14]
    assert times.turn_offsets.tolist() == [0, 2, 3, 6, 7, 9, 11, 12, 14]
    assert times.sequence_turns.tolist() == [0, 2, 2, 3, 6, 7, 8]
    assert times.turn_starts.nonzero().flatten().tolist() == [0, 2, 3, 6, 7, 9, 11, 12]


def test_group_baseline_leaves_out_rows_out_of_play() -> None:
    """Row 4 is not in play: neither its advantage nor its group's mean knows its reward."""
    batch = batch_of(TURNS, [1.0, 9.0, 2.0, 5.0, 100.0, 2.0], GROUPS, feedback=[[0.5, 0], [], [0], [0, 0, 0], [0], [0]])
    found, times = estimated(AlgorithmConfig(estimator="dr_grpo"), batch, [0, 2, 3, 5])
    expected = methods.dr_grpo([1.5, 2.0, 5.0, 2.0], ["a", "b", "b", "b"])
    per_row = [found.advantages[o].item() for o, n in zip(times.offsets, times.offsets.diff(), strict=False) if n]
    assert per_row == pytest.approx([*expected[:3], 0.0, expected[3]])
    assert found.returns is None


@pytest.mark.parametrize("advantage", ["gae", "turn_gae"])
def test_critic_estimators_are_the_slow_recursion(advantage: str) -> None:
    batch = batch_of(TURNS, [1.0, 9.0, 2.0, 5.0, 3.0, 2.0], GROUPS, feedback=[[0.5, 1], [], [2], [1, 0, 3], [0], [1]])
    times = times_of(batch)
    values, bootstrap = torch.randn(14, dtype=torch.float64), torch.tensor([0.0, 0, 2.0, 0, 0, 0], dtype=torch.float64)
    algorithm = AlgorithmConfig(gamma=0.9, estimator={"name": advantage, "lam_actor": 0.8, "lam_critic": 0.6})
    found, _ = estimated(algorithm, batch, [0, 2, 3, 4, 5], values, bootstrap)
    rewards = place_all_rewards(AlgorithmConfig(), batch, times).double()
    for row in range(6):
        span = range(int(times.offsets[row]), int(times.offsets[row + 1]))
        steps = [[j] for j in span]
        if advantage == "turn_gae":
            cuts = [int(o) for o in times.turn_offsets if span.start <= o <= span.stop]
            steps = [list(range(a, b)) for a, b in zip(cuts, cuts[1:], strict=False)]
        r = [float(rewards[step].sum()) for step in steps]
        v = [float(values[step[0]]) for step in steps]
        actor, critic = (plain.gae(r, v, float(bootstrap[row]), 0.9, lam) for lam in (0.8, 0.6))
        for step, a, c, value in zip(steps, actor, critic, v, strict=True):
            assert found.advantages[step].tolist() == pytest.approx([a] * len(step))
            assert float(found.returns[step[0]]) == pytest.approx(c + value)


def test_lambda_grows_with_length() -> None:
    batch = batch_of([[4], [40]], [1.0, 1.0], ["a", "b"])
    zeros = torch.zeros(44, dtype=torch.float64)
    found, _ = estimated(
        AlgorithmConfig(estimator={"lam_alpha": 0.5}), batch, [0, 1], zeros, torch.zeros(2, dtype=torch.float64)
    )
    # λ = 1 − 1/(αJ): 0.5 and 0.95; with V = 0 the first advantage is λ^(J−1).
    assert float(found.advantages[0]) == pytest.approx(0.5**3)
    assert float(found.advantages[4]) == pytest.approx(0.95**39)


def test_value_pretraining_targets_are_monte_carlo_returns() -> None:
    batch = batch_of([[3]], [2.0], ["a"])
    values, none = torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    algorithm = AlgorithmConfig(estimator={"lam_critic": 0.2})
    assert estimated(algorithm, batch, [0], values, none, monte_carlo=True)[0].returns.tolist() == [2.0] * 3
    assert estimated(algorithm, batch, [0], values, none)[0].returns.tolist() != [2.0] * 3


@pytest.mark.parametrize("good", [True, False])
def test_evpo_leaves_a_critic_that_explains_nothing(good: bool) -> None:
    batch = batch_of([[1], [1], [1], [1]], [0.0, 1.0, 2.0, 3.0], list("abcd"))
    values = torch.tensor([0.1, 1.1, 1.9, 3.0] if good else [3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    found, _ = estimated(AlgorithmConfig(estimator="evpo"), batch, [0, 1, 2, 3], values, torch.zeros(4).double())
    returns = torch.tensor([0.0, 1, 2, 3], dtype=torch.float64)
    expected = returns - values if good else returns - 1.5
    torch.testing.assert_close(found.advantages, expected)
    assert found.metrics["evpo/critic"] == float(good)


def test_overlong_penalty_is_paid_on_the_last_decision() -> None:
    algorithm = AlgorithmConfig(overlong_penalty={"length": 4, "buffer": 2})
    batch = batch_of([[2], [3], [4], [1]], [1.0] * 4, list("abcd"))
    rewards = place_all_rewards(algorithm, batch, times_of(batch))
    assert rewards.tolist() == [0, 1, 0, 0, 0.5, 0, 0, 0, 0, 1]


def test_set_rewards_share_draws_within_a_group_and_take_the_best_answer() -> None:
    answers = [[[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.6]], None, [[1.0, 0.0]]]
    batch = batch_of(
        [[1]] * 4, [0.0] * 4, ["a", "a", "a", "b"],
        metadata=[{} if a is None else {"answer_rewards": a} for a in answers], vectors=[None, None, [0.0, 1.0], None],
    )  # fmt: skip
    vpo, ids = VPO(draws=4096), integer_ids(batch.group_ids)
    found = vpo.set_returns(batch, ids, torch.ones(4, dtype=torch.bool))
    # w uniform on the simplex of two: E max(w, 1−w) = 3/4, E w = 1/2; 0.6 whatever w.
    assert found.tolist() == pytest.approx([0.75, 0.6, 0.5, 0.5], abs=0.02)
    again = vpo.set_returns(batch, ids, torch.ones(4, dtype=torch.bool))
    assert torch.equal(found, again)
    single = [float(x) for x in vpo.set_returns(batch, ids, torch.tensor([True, False, True, False]))]
    assert single == [float(found[0]), 0.0, float(found[2]), 0.0]


def test_vpo_without_vectors_says_what_to_record() -> None:
    batch = batch_of([[1], [1]], [0.0, 1.0], ["a", "a"])
    with pytest.raises(RolloutError, match="reward_vector"):
        estimated(AlgorithmConfig(estimator="vpo"), batch, [0, 1])


def test_vectors_of_unequal_length_are_named() -> None:
    batch = batch_of([[1]] * 3, [0.0] * 3, ["a"] * 3, vectors=[[1.0, 2.0], [1.0, 2.0], [1.0]])
    with pytest.raises(RolloutError, match="row=2, field=reward_vector.*found 1, expected 2"):
        estimated(AlgorithmConfig(estimator="vpo"), batch, [0, 1, 2])


def test_correctness_is_recorded_or_a_bound_on_the_return() -> None:
    batch = batch_of([[1], [1]], [0.0, 1.0], ["a", "a"], metadata=[{"success": True}, {"success": False}])
    returns = torch.tensor([0.0, 1.0])
    assert correct_rows(AlgorithmConfig(), batch, returns).tolist() == [True, False]
    assert correct_rows(AlgorithmConfig(correct_return=0.5), batch, returns).tolist() == [False, True]
    with pytest.raises(RolloutError, match="correct_return"):
        correct_rows(AlgorithmConfig(), batch_of([[1]], [0.0], ["a"]), returns[:1])


def test_batch_mean_is_over_rows_in_play() -> None:
    batch = batch_of([[2], [1], [1]], [1.0, 3.0, 50.0], list("abc"))
    found, _ = estimated(AlgorithmConfig(estimator="batch_mean"), batch, [0, 1])
    assert found.advantages.tolist() == [-1.0, -1.0, 1.0, 0.0]
    assert math.isfinite(float(np.sum(found.advantages.numpy())))
