"""A whole asynchronous run with a real vLLM: played in a process of its own, replayed from its files bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.pool import RankPool
from tests.dist.test_async import ITERATIONS, ledger_rows, same_weights, settings, train, wait_for_no_process
from tests.vllm.conftest import lake_model


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "vllm_http"])
def test_a_run_on_vllm_rollouts(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    model, output = lake_model(tmp_path / "model"), tmp_path / "run"
    vllm = {"engine": engine, "engine_options": {"kv_cache_bytes": 64 << 20}, "restarts": 0}
    rows = ranks.run(train, 1, settings(model, output, rollout=vllm), timeout=400)[0]
    assert len(rows) == ITERATIONS
    assert rows[0]["first_step/k3"] < 1e-6, "the trainer agrees with vLLM's log-probs"
    assert max(row["stream/staleness_max"] for row in rows) <= 2
    assert max(row["replay/missing"] for row in rows) == 0
    assert not list((output / "weights").glob("*.rejected.json"))
    used = [row for rows_of_entry in ledger_rows(output) for row in rows_of_entry]
    assert len(used) == len(set(used))
    wait_for_no_process(output)
    replayed = settings(model, tmp_path / "replay", rollout={"recorded": str(output)})
    ranks.run(train, 1, replayed)
    assert same_weights(output, tmp_path / "replay")
