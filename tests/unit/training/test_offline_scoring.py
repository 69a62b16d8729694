"""Where shards are looked for, and the table that scores become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.errors import RolloutError
from megatron_rl.training.offline_scoring import scores_table, shard_directories


def test_shards_are_found_here_or_one_level_below(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no recorded rollouts"):
        shard_directories(tmp_path)
    for name in ("iteration-000001", "iteration-000000", "quarantine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.arrow").touch()
    (tmp_path / "empty").mkdir()
    assert [found.name for found in shard_directories(tmp_path)] == ["iteration-000000", "iteration-000001"]
    assert shard_directories(tmp_path / "iteration-000000") == [tmp_path / "iteration-000000"]


def test_each_trajectory_has_its_own_decisions() -> None:
    batch = SimpleNamespace(sources=[("a", 0), ("a", 1), ("b", 0)], trajectory_ids=["x", "y", "z"])
    vectors = {
        name: torch.arange(6.0) + 10 * i for i, name in enumerate(("behaviour", "values", "advantages", "returns"))
    }
    scored = SimpleNamespace(
        batch=batch, rows=np.array([0, 2]), offsets=torch.tensor([0, 2, 3, 6]), reference=None, **vectors
    )
    table = scores_table(scored, -torch.arange(6.0)).to_pydict()
    assert "reference" not in table and table["trajectory_id"] == ["x", "z"] and table["file"] == ["a", "b"]
    assert table["logprobs"] == [[0, -1], [-3, -4, -5]] and table["row"] == [0, 0]
    assert table["values"] == [[10, 11], [13, 14, 15]] and table["returns"] == [[30, 31], [33, 34, 35]]
