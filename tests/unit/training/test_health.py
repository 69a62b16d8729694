"""A run that learns nothing stops with the first reason; one that learns goes on, and says what it left out."""

from __future__ import annotations

import pytest

from megatron_rl.errors import LearningError
from megatron_rl.training.health import SkippedSteps, check_episodes
from tests.unit.algorithm.batches import batch_of

BROKEN = {"error": "KeyError: 'answer'"}


def batch(outcomes: list[str]):
    metadata = [BROKEN if outcome == "environment_error" else {} for outcome in outcomes]
    return batch_of([[1]] * len(outcomes), [0.0] * len(outcomes), ["a"] * len(outcomes), outcomes=outcomes,
                    metadata=metadata)  # fmt: skip


def test_nothing_failed() -> None:
    assert check_episodes(batch(["completed", "tool_error"]), 0, 0.0) == {"rollout/failed": 0.0}


@pytest.mark.parametrize(("not_started", "share"), [(0, 0.5), (4, 0.75)])
def test_what_failed_is_counted_and_warned_of(not_started: int, share: float) -> None:
    four = batch(["completed", "environment_error", "aborted", "completed"])
    with pytest.warns(UserWarning, match="KeyError: 'answer'"):
        assert check_episodes(four, not_started, 0.75) == {"rollout/failed": share}


def test_too_many_failures_end_the_run_with_the_first_reason() -> None:
    with pytest.raises(LearningError, match="KeyError: 'answer'") as caught:
        check_episodes(batch(["completed", "environment_error", "aborted"]), 0, 0.5)
    assert (caught.value.file, caught.value.row) == ("memory", 1) and "2 of 3" in str(caught.value)
    with pytest.raises(LearningError, match="did not start"):
        check_episodes(batch(["completed"]), 2, 0.5)


SKIPPED, STEPPED, NOT_FINITE = {"actor/skipped": 1.0}, {"actor/stepped": 1.0}, {"actor/stepped": 0.0}
CRITIC = {"critic/stepped": 1.0}


def test_steps_in_a_row_that_change_nothing_end_the_run() -> None:
    steps = SkippedSteps(3)
    steps.observe([CRITIC, SKIPPED, SKIPPED, STEPPED])
    steps.observe([CRITIC, SKIPPED, NOT_FINITE])
    with pytest.raises(LearningError, match="3 optimizer steps of the actor.*no decision"):
        steps.observe([CRITIC, SKIPPED])
    with pytest.raises(LearningError, match="not finite.*learning rates"):
        SkippedSteps(1).observe([NOT_FINITE])
    with pytest.raises(LearningError, match="of the critic"):
        SkippedSteps(2).observe([STEPPED, {"critic/skipped": 1.0}, STEPPED, {"critic/stepped": 0.0}])


def test_a_run_whose_every_step_was_skipped_does_not_end_well() -> None:
    steps = SkippedSteps(9)
    steps.require_one("actor", 0)  # none was tried: the critic warmed up
    steps.observe([SKIPPED])
    steps.require_one("actor", 5)
    with pytest.raises(LearningError, match="changed nothing"):
        steps.require_one("actor", 0)
