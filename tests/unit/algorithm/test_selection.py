"""What group methods leave out, and how much is played in its place."""

from __future__ import annotations

import pytest

from megatron_rl.algorithm.selection import episodes_to_refill, select, total_rewards
from megatron_rl.config import AlgorithmConfig, RunConfig
from megatron_rl.errors import ConfigError
from tests.unit.algorithm.batches import batch_of

DAPO = AlgorithmConfig(estimator="grpo", anchor="recompute", dynamic_sampling={})


def test_excluded_and_empty_trajectories_are_not_in_play() -> None:
    batch = batch_of([[1], [], [2]], [0.0] * 3, ["a"] * 3, outcomes=["completed", "completed", "aborted"])
    assert select(AlgorithmConfig(), batch).rows.tolist() == [0]


def test_groups_of_equal_rewards_are_dropped() -> None:
    """Six rewards of 0.7 have a positive standard deviation in floating point; an aborted one does not make a group
    informative; feedback counts."""
    batch = batch_of(
        [[1]] * 12, [0.7] * 6 + [1, 1, 5] + [0, 1, 1], ["a"] * 6 + ["b"] * 3 + ["c"] * 3,
        outcomes=["completed"] * 8 + ["aborted"] + ["completed"] * 3,
    )  # fmt: skip
    found = select(DAPO, batch)
    assert found.rows.tolist() == [9, 10, 11]
    assert found.metrics["sampling/uniform_groups"] == 2 and found.metrics["sampling/informative"] == 3
    told = batch_of([[1, 1]] * 2, [1.0, 1.0], ["a", "a"], feedback=[[0.0, 0.5], [0.0, 0.0]])
    assert total_rewards(told).tolist() == [1.5, 1.0] and select(DAPO, told).rows.tolist() == [0, 1]


def test_leave_one_out_drops_who_is_left_alone() -> None:
    rloo = AlgorithmConfig(estimator="rloo", anchor="recompute")
    batch = batch_of([[1]] * 4, [0.0, 1.0, 2.0, 3.0], ["a", "a", "b", "b"], outcomes=["completed"] * 3 + ["aborted"])
    found = select(rloo, batch)
    assert found.rows.tolist() == [0, 1] and found.metrics["sampling/alone"] == 1


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_are_refused_at_the_first_batch(advantage: str) -> None:
    batch = batch_of([[1], [1]], [0.0, 1.0], ["a", "b"])
    with pytest.raises(ConfigError, match="maps_per_prompt"):
        select(AlgorithmConfig(estimator=advantage, anchor="recompute"), batch)
    assert select(AlgorithmConfig(estimator="batch_mean", anchor="recompute"), batch).rows.tolist() == [0, 1]


def test_refill_is_what_is_missing_in_whole_groups() -> None:
    batch = batch_of([[1]] * 8, [0, 1, 1, 1, 2, 2, 2, 2], ["a"] * 4 + ["b"] * 4)
    for wanted, missing in ((9, 8), (5, 4), (4, 0), (2, 0)):
        assert episodes_to_refill(RunConfig(algorithm=DAPO, rollout={"episodes": wanted}), batch) == missing
