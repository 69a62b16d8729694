"""What a batch tells, against sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.metrics import (
    batch_metrics,
    prompt_information_metrics,
    prompt_mean_baseline,
    staleness_metrics,
)
from tests.unit.algorithm.batches import batch_of


def test_spread_within_groups_outcomes_and_success() -> None:
    batch = batch_of(
        [[1]] * 5, [0.0, 2.0, 5.0, 5.0, 99.0], ["a", "a", "b", "b", "b"],
        outcomes=["completed", "truncated_turns", "completed", "completed", "aborted"],
        metadata=[{"success": s} for s in (True, False, False, True, True)],
    )  # fmt: skip
    found = batch_metrics(batch, np.array([0, 1, 2, 3]))
    assert found["rollout/reward_std_within_group"] == pytest.approx(math.sqrt(0.5))  # variances 1, 1, 0, 0
    assert found["outcome/completed"] == 0.6 and found["outcome/aborted"] == 0.2
    assert found["success/completed"] == pytest.approx(2 / 3) and found["success/truncated_turns"] == 0
    assert batch_metrics(batch, np.empty(0, np.int64)) == {"rollout/trajectories": 0.0}


def test_group_mean_as_a_baseline_explains_what_differs_between_groups() -> None:
    batch = batch_of([[1]] * 4, [0.0, 2.0, 10.0, 12.0], ["a", "a", "b", "b"])
    found = prompt_mean_baseline(batch, np.arange(4))["critic/explained_variance_of_group_mean"]
    assert found == pytest.approx(1 - 1 / 26)  # variance 26, within groups 1
    assert list(prompt_mean_baseline(batch, np.array([0])).values()) == [0.0]


def test_staleness_shares_and_mean() -> None:
    versions = torch.tensor([5, 5, 4, 0, 3])
    found = staleness_metrics(versions, 5, torch.tensor([True, True, True, True, False]))
    assert found["staleness/mean"] == 1.5
    assert [found[f"staleness/{bin}"] for bin in ("0", "1", "2", "3", "4+")] == [0.5, 0.25, 0.0, 0.0, 0.25]


def test_staleness_of_a_stream_has_a_share_for_every_age_there_is() -> None:
    names = {"prefix": "stream/staleness_", "share": "stream/staleness_share/", "oldest": None}
    found = staleness_metrics(torch.tensor([5, 5, 4, 0], dtype=torch.int32), 5, **names)
    shares = {f"stream/staleness_share/{age}": part for age, part in enumerate((0.5, 0.25, 0.0, 0.0, 0.0, 0.25))}
    assert found == {"stream/staleness_mean": 1.5, **shares}
    assert staleness_metrics(torch.zeros(0, dtype=torch.int32), 5, **names) == {}


@pytest.mark.parametrize("reads", [True, False])
def test_mutual_information_tells_whether_responses_depend_on_prompts(reads: bool) -> None:
    """A policy that says a token of its prompt, and one that ignores it; three of four prompts are used."""
    batch = batch_of([[2]] * 4, [0.0] * 4, ["a", "b", "c", "d"])
    tokens = batch.tokens.copy()
    for start, name in zip(batch.offsets, range(4), strict=False):
        tokens[start : start + 4] = [name, 0, name, name]
    object.__setattr__(batch, "tokens", tokens)
    asked = []

    def score(stream):
        asked.append(len(stream.offsets) - 1)
        found = []
        for b in range(len(stream.offsets) - 1):
            own = stream.tokens[stream.offsets[b] : stream.offsets[b + 1]]
            found += [-0.1 if own[0] == token or not reads else -4.0 for token in own[2:]]
        return torch.tensor(found)

    metrics = prompt_information_metrics(batch, np.arange(4), 3, score)
    assert asked == [9]
    if reads:
        marginal = math.log((math.exp(-0.2) + 2 * math.exp(-8.0)) / 3)
        assert metrics["prompts/mutual_information"] == pytest.approx((-0.2 - marginal) / 2)
        assert 0 < metrics["prompts/mutual_information"] <= math.log(3) / 2 and metrics["prompts/retrieval"] == 1
    else:
        assert metrics["prompts/mutual_information"] == pytest.approx(0, abs=1e-6)
    assert prompt_information_metrics(batch, np.arange(4), 0, score) == {}
