"""A real vLLM that sleeps: its memory is really released, and awake again it holds the version that it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.host_memory import resident_bytes
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.engines.vllm.server_group import ServerGroup
from megatron_rl.errors import CheckpointError, EngineError, EngineVersionError
from tests.dist.pool import RankPool
from tests.dist.test_async import settings, train, wait_for_no_process
from tests.vllm.conftest import CANARY_TOKENS, KeepOpen, Published, holds, lake_model, options
from tests.waiting import wait_until

KV_BYTES, EXACT = 64 << 20, ReplicaSetSettings(max_k3=1e-6)


def memory_of(inprocess) -> int:
    """Bytes that its parameters, keys and values have now."""

    def count(worker) -> int:
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
        storages = [one.untyped_storage() for one in (*worker.model_runner.get_model().parameters(), *caches)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    return inprocess._llm.collective_rpc(count)[0]


def test_memory_is_released_and_the_same_completion_comes_back(inprocess, published: Published) -> None:
    with VllmEngine([KeepOpen(inprocess)], published.v0, settings=EXACT) as engine:
        assert engine.can_sleep
        (before,), expected = engine.generate([CANARY_TOKENS], 24, [], greedy=True), memory_of(inprocess)
        found = engine.sleep()
        assert expected > KV_BYTES * 0.9 and memory_of(inprocess) == 0
        assert found.awake - found.asleep > 0.9 * expected, found
        (after,) = engine.generate([CANARY_TOKENS], 24, [], greedy=True)
        assert memory_of(inprocess) == expected
        assert resident_bytes() - found.asleep > 0.9 * expected
        for name in ("tokens", "logprobs", "routes"):
            assert np.array_equal(getattr(before, name), getattr(after, name)), name
        assert after.version == 0 and holds(engine, published.v0, 1e-6)


def test_an_update_while_asleep_serves_the_new_version(inprocess, published: Published) -> None:
    with VllmEngine([KeepOpen(inprocess)], published.v0, settings=EXACT) as engine:
        assert holds(engine, published.v0, 1e-6), "prefixes of these tokens are stored"
        engine.sleep()
        engine.load(published.v1, 1)
        assert engine.version == 1 and holds(engine, published.v1, 1e-6) and not holds(engine, published.v0, 1e-6)
        assert engine.generate([CANARY_TOKENS], 4, [])[0].version == 1


@pytest.mark.parametrize(
    ("name", "version", "error"),
    [("liar", 2, EngineVersionError), ("torn", 3, CheckpointError), ("partial", 4, EngineVersionError)],
)
def test_a_failed_update_while_asleep_serves_the_old_version(inprocess, published, name, version, error) -> None:
    with VllmEngine([KeepOpen(inprocess)], published.v1, version=1, settings=EXACT) as engine:
        engine.sleep()
        with pytest.raises(error):
            engine.load(getattr(published, name), version)
        assert (memory_of(inprocess) == 0) == (name == "torn"), "none is woken for a damaged directory"
        assert engine.version == 1 and holds(engine, published.v1, 1e-6)
        assert engine._call(inprocess.differing(published.v1)) == []


def test_a_sleeping_replica_holds_no_weights_and_is_woken_by_the_next_engine(inprocess, published: Published) -> None:
    with VllmEngine([KeepOpen(inprocess)], published.v0, settings=EXACT) as engine:
        engine.sleep()
        with pytest.raises(EngineError, match="holds no weights"):
            engine._call(inprocess.differing(published.v0))
    with VllmEngine([KeepOpen(inprocess)], published.v1, version=1, settings=EXACT) as engine:
        assert holds(engine, published.v1, 1e-6)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_servers_sleep_too_and_one_that_was_killed_meanwhile_recovers(published: Published, tmp_path) -> None:
    patient = ReplicaSetSettings(attempts=6, patience=400, health_every=1.0, max_k3=1e-6)
    with ServerGroup(options(published.v0, "float32", can_sleep=True), tmp_path, [{}]) as group:
        (server,) = group.servers
        with VllmEngine([HttpReplica(server.url)], published.v0, settings=patient) as engine:
            (before,) = engine.generate([CANARY_TOKENS], 24, [], greedy=True)
            found = engine.sleep()
            assert found.awake - found.asleep > 0.9 * KV_BYTES, found
            (after,) = engine.generate([CANARY_TOKENS], 24, [], greedy=True)
            assert np.array_equal(before.tokens, after.tokens) and np.array_equal(before.routes, after.routes)
            engine.sleep()
            with pytest.raises(EngineVersionError):
                engine.load(published.liar, 2)
            assert engine.version == 0 and holds(engine, published.v0, 1e-6)
            engine.sleep()
            engine.load(published.v1, 1)
            assert holds(engine, published.v1, 1e-6)
            engine.sleep()
            os.killpg(server._process.pid, signal.SIGKILL)
            wait_until_it_sleeps_again(engine, group)
            assert holds(engine, published.v1, 1e-6), "it began with version 0"
            assert engine._call(engine._replicas.states[0].replica.differing(published.v1)) == []


def wait_until_it_sleeps_again(engine: VllmEngine, group: ServerGroup) -> None:
    async def asleep() -> bool:
        try:
            return await engine._replicas.states[0].replica.is_sleeping()
        except EngineError:
            return False

    def restarted_and_asleep() -> bool:
        return group.restarts == [1] and engine._call(asyncio.wait_for(asleep(), 20))

    wait_until(restarted_and_asleep, 300, pause=0.5, what=engine.faults)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "vllm_http"])
def test_a_colocated_run_with_vllm(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    model, output = lake_model(tmp_path / "model"), tmp_path / "run"
    vllm = {"engine": engine, "engine_options": {"kv_cache_bytes": KV_BYTES}, "restarts": 0}
    turns = {"rollout": {"mode": "sync", "colocated": True, **vllm}, "parallel": {"phase_offload": True}}
    rows = ranks.run(train, 1, settings(model, output, iterations=2, **turns), timeout=400)[0]
    assert len(rows) == 2 and rows[0]["first_step/k3"] < 1e-6
    for row in rows:
        assert row["stream/staleness_max"] == 0 and row["replay/missing"] == 0
        assert row["stream/engine_awake_bytes"] - row["stream/engine_asleep_bytes"] > 0.9 * KV_BYTES
        assert row["stream/trainer_peak_bytes"] > 0
    assert not list((output / "weights").glob("*.rejected.json"))
    wait_for_no_process(output)
