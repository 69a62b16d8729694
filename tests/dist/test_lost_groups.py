"""Groups with a member whose environment did not start: nobody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.rollouts.store import read_batch
from tests.dist.broken_lake import BROKEN_BLOCKS
from tests.dist.pool import RankPool
from tests.dist.test_async import ledger_rows, settings, train, wait_for_no_process


@pytest.mark.parametrize("stragglers", ["drop", pytest.param("deliver", marks=pytest.mark.full)])
def test_groups_that_cannot_become_whole_are_given_up(ranks: RankPool, tmp_path: Path, stragglers: str) -> None:
    """All that there is room for at first is halves of pairs: no version will come that makes them too old."""
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    model, output = tmp_path / "model", tmp_path / "run"
    write_tiny_checkpoint(model, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2, moe_hidden_size=16))
    plain = settings(model, output, iterations=2)
    plain["rollout"] |= {
        "environment": "tests.dist.broken_lake:BrokenLakeTask",
        "environment_options": {"evaluation_maps": 4, "maps_per_prompt": 2},
        "mode": "one_step_off",
        "episodes": 4,
        "concurrency": 16,
        "stragglers": stragglers,
    }
    rows = ranks.run(train, 1, plain, timeout=150)[0]
    wait_for_no_process(output)
    assert [row["rollout/trajectories"] for row in rows] == [4, 4]
    assert rows[0]["stream/expired"] >= 8, "the first room was used up by halves"
    used = [place for places in ledger_rows(output) for place in places]
    for file, row in used:
        name = read_batch([output / file]).trajectory_ids[row]
        assert int(name.split("-")[1]) >= BROKEN_BLOCKS, name
    assert len(set(used)) == 8
