"""A vLLM engine that sleeps: sleeping replicas get no calls, calls and updates wake them with verified weights."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.host_memory import ReleasableMemory, resident_bytes
from megatron_rl.engines.vllm.options import VllmOptions
from megatron_rl.errors import CheckpointError, EngineUnavailableError, EngineVersionError
from tests.unit.engines.counting_replica import FAST, VERSIONS, CountingReplica, make_engine, versions
from tests.waiting import wait_until

__all__ = ["versions"]


def sampled(engine: VllmEngine) -> set[int]:
    """The tokens of a generation: the number of the weights that sampled it."""
    return set(engine.generate([[1, 2]], 4, [])[0].tokens.tolist())


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3))
def test_calls_updates_and_sleeps_in_any_order(versions: list[Path], seed: int, count: int) -> None:
    """A replica fails if it is called while it sleeps, loads before it is woken, or goes to sleep during a call."""
    rng = random.Random(seed)
    engine, _ = make_engine(versions, count, ReplicaSetSettings(attempts=50, backoff=0, health_every=0.001))

    async def episode() -> None:
        for _ in range(6):
            await asyncio.sleep(rng.random() / 100)
            generation = await engine.agenerate([1] * 5, rng.randrange(1, 40), [])
            assert set(generation.tokens.tolist()) == {generation.version}

    async def play() -> None:
        episodes = [asyncio.create_task(episode()) for _ in range(4)]
        for version in range(1, VERSIONS):
            await asyncio.sleep(rng.random() / 100)
            found = await asyncio.to_thread(engine.sleep)
            assert found.awake > found.asleep == 10
            await asyncio.sleep(rng.random() / 100)
            await asyncio.to_thread(engine.load, versions[version], version)
        await asyncio.gather(*episodes)

    with engine:
        asyncio.run(play())
        assert engine.version == VERSIONS - 1 and sampled(engine) == {VERSIONS - 1} and not engine.faults


def test_a_call_and_a_score_wake_it_with_the_weights_it_had(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        engine.load(versions[1], 1)
        engine.sleep()
        assert all(replica.asleep for replica in replicas) and engine.version == 1
        assert sampled(engine) == {1} and not any(replica.asleep for replica in replicas)
        engine.sleep()
        assert engine.score([1, 2]).tolist() == [0.0, -1.0]


def test_an_update_wakes_it_with_the_new_weights_only(versions: list[Path]) -> None:
    engine, (replica,) = make_engine(versions, 1)
    with engine:
        engine.sleep()
        replica.refused = {versions[0]}
        engine.load(versions[2], 2)
        assert sampled(engine) == {2}, "the old version was not loaded on the way"


def test_a_refused_update_while_asleep_serves_the_old_version(versions: list[Path], tmp_path: Path) -> None:
    engine, replicas = make_engine(versions)
    (tmp_path / "config.json").write_text("{}")
    write_publication(tmp_path, 2)
    (tmp_path / "config.json").write_text("[]")
    with engine:
        engine.load(versions[1], 1)
        engine.sleep()
        with pytest.raises(CheckpointError):
            engine.load(tmp_path, 2)
        assert all(replica.asleep for replica in replicas), "none is woken for a damaged directory"
        for replica in replicas:
            replica.refused = {versions[2]}
        with pytest.raises(EngineVersionError, match="version 1 serves on"):
            engine.load(versions[2], 2)
        assert engine.version == 1 and sampled(engine) == {1}


def test_health_checks_do_not_wake_sleeping_replicas(versions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        engine.sleep()
        start = [replica.sleep_checks for replica in replicas]
        for replica in replicas:
            monkeypatch.setattr(replica, "tag", None)
        wait_until(lambda: all(r.sleep_checks > n + 3 for r, n in zip(replicas, start, strict=True)))
        assert all(replica.asleep for replica in replicas) and not engine.faults


def test_a_server_restarted_while_asleep_sleeps_again_and_wakes_with_the_right_weights(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        engine.load(versions[1], 1)
        engine.sleep()
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        wait_until(lambda: replicas[0].slept == 2)
        assert replicas[0].asleep and sampled(engine) == {1}
        engine.sleep()
        replicas[0].up = False
        assert sampled(engine) == {1}, "the other one serves"
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        wait_until(lambda: engine._replicas.states[0].serving)
        assert replicas[0].held == versions[1]


def test_a_server_restarted_unnoticed_is_woken_and_verified(versions: list[Path]) -> None:
    engine, (replica,) = make_engine(versions, 1, ReplicaSetSettings(backoff=0.0, patience=5.0, health_every=600.0))
    with engine:
        engine.load(versions[1], 1)
        engine.sleep()
        engine._loop.call_soon_threadsafe(replica.restart)
        assert sampled(engine) == {1} and replica.held == versions[1]


def test_a_replica_that_does_not_go_to_sleep_is_an_error_that_the_engine_survives(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        replicas[0].up = False
        with pytest.raises(EngineUnavailableError, match="down"):
            engine.sleep()
        assert sampled(engine) == {0}


def test_an_engine_that_finds_a_sleeping_replica_gives_it_weights(versions: list[Path]) -> None:
    """Left by a rollout process that was killed."""
    replica = CountingReplica("left", versions[0])
    replica.asleep, replica.held = True, Path("nothing")
    with VllmEngine([replica], versions[1], version=1, settings=FAST) as engine:
        assert sampled(engine) == {1}


@pytest.mark.parametrize("step", ["pause", "wake", "load", "differing", "resume"])
def test_a_caller_cancelled_while_the_engine_wakes_does_not_leave_it_half_awake(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """No health check is due: a replica left half awake must be checked at once."""
    engine, replicas = make_engine(versions, 3, ReplicaSetSettings(backoff=0.0, patience=5.0, health_every=600.0))
    reached, original = threading.Event(), getattr(replicas[1], step)

    async def hangs_once(*arguments: Any) -> Any:
        monkeypatch.setattr(replicas[1], step, original)
        reached.set()
        await asyncio.Event().wait()

    async def give_up() -> None:
        call = asyncio.create_task(engine.agenerate([1], 8, []))
        assert await asyncio.to_thread(reached.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert set((await engine.agenerate([1], 8, [])).tokens.tolist()) == {0}

    with engine:
        engine.sleep()
        monkeypatch.setattr(replicas[1], step, hangs_once)
        asyncio.run(asyncio.wait_for(give_up(), 20))
        wait_until(lambda: all(state.serving for state in engine._replicas.states))


def test_no_two_streams_are_alike(versions: list[Path]) -> None:
    """Replicas that were started alike; an update, a sleep, a restart; another run."""

    def streams(seed: int) -> list[float]:
        replicas, found = [CountingReplica(f"r{i}", versions[0]) for i in range(2)], []
        with VllmEngine(replicas, versions[0], seed=seed, settings=FAST) as engine:
            found += [replica.seeds[-1] for replica in replicas]
            engine.load(versions[1], 1)
            found += [replica.seeds[-1] for replica in replicas]
            engine.sleep()
            sampled(engine)
            found += [replica.seeds[-1] for replica in replicas]
            engine._loop.call_soon_threadsafe(replicas[0].restart)
            wait_until(lambda: len(replicas[0].seeds) == 4)
            return [*found, replicas[0].seeds[-1]]

    assert streams(1) == streams(1) and len(set(streams(1) + streams(2))) == 14


def test_seeds_reach_sleeping_replicas(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        engine.sleep()
        engine.reseed(1)
        first = [replica._random.random() for replica in replicas]
        engine.reseed(1)
        assert first == [replica._random.random() for replica in replicas]


def test_released_memory_leaves_the_process_and_is_restored_as_zeros() -> None:
    small = [torch.full((1000,), float("nan")) for _ in range(64)]
    large = torch.ones(8 << 20)
    view, before = large[5:], resident_bytes()
    memory = ReleasableMemory()
    memory.release([large, view, *small])
    assert memory and resident_bytes() < before - large.nbytes * 0.9
    memory.release([large])
    memory.restore()
    assert not memory and view.numel() == (8 << 20) - 5 and not view.any() and not any(one.any() for one in small)
    view[0] = 3
    assert large[5] == 3, "still a view"


def test_sleep_mode_is_switched_on_where_it_exists_and_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert "enable_sleep_mode" not in VllmOptions("m").arguments()
        assert VllmOptions("m", can_sleep=True).arguments().get("enable_sleep_mode", False) == gpu
