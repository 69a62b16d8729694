"""The vLLM engine over replicas that only count: one version a generation, one result a call, lost replicas recovered.

tests/vllm checks the same with a real vLLM; here thousands of interleavings are cheap.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines import Generation
from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.vllm.completion import CompletionRequest
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.prefix_affinity import PrefixAffinity
from megatron_rl.errors import (
    CheckpointError,
    ConfigError,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    EngineVersionError,
    RolloutError,
)
from tests.unit.engines.counting_replica import VERSIONS, VOCAB, CountingReplica, make_engine, versions
from tests.waiting import wait_until

__all__ = ["versions"]


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), finish=st.booleans(), count=st.integers(1, 3))
def test_a_generation_has_one_version_and_every_call_one_result(versions, seed: int, finish: bool, count: int) -> None:
    rng = random.Random(seed)
    engine, replicas = make_engine(
        versions, count, ReplicaSetSettings(attempts=50, backoff=0, health_every=0.01, finish_calls=finish)
    )
    wanted = [[rng.randrange(1, 40) for _ in range(5)] for _ in range(8)]

    async def episode(lengths: list[int]) -> list[Generation]:
        found = []
        for n in lengths:
            await asyncio.sleep(rng.random() / 500)
            if rng.random() < 0.1:
                fault = rng.choice([EngineUnavailableError, EngineAnswerError, EngineVersionError])
                rng.choice(replicas).faults.append(fault("spoiled"))
            found.append(await engine.agenerate([1] * rng.randrange(1, 9), n, []))
        return found

    async def play() -> list[list[Generation]]:
        episodes = [asyncio.create_task(episode(lengths)) for lengths in wanted]
        for version in range(1, VERSIONS):
            await asyncio.sleep(rng.random() / 200)
            await asyncio.to_thread(engine.load, versions[version], version)
        return await asyncio.gather(*episodes)

    with engine:
        played = asyncio.run(play())
        assert engine.version == VERSIONS - 1
    for found, lengths in zip(played, wanted, strict=True):
        for generation, n in zip(found, lengths, strict=True):
            assert set(generation.tokens.tolist()) == {generation.version}
            assert generation.interrupted == (len(generation.tokens) < n)
            assert not (finish and generation.interrupted)


def test_lost_replica_serves_again_only_with_the_right_weights(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions, 1)
    with engine:
        engine.load(versions[2], 2)
        replicas[0].up = False
        with pytest.raises(EngineUnavailableError):
            engine._call(asyncio.wait_for(_complete_impatiently(engine), 1))
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        (generation,) = engine.generate([[1, 2]], 3, [])
        assert generation.version == 2 and generation.tokens.tolist() == [2, 2, 2]
        assert replicas[0].held == versions[2]


def test_replica_that_was_restarted_unnoticed_is_verified_before_it_serves(versions: list[Path]) -> None:
    """No health check is due: only the completion's fingerprint shows it."""
    engine, replicas = make_engine(versions, 1, ReplicaSetSettings(backoff=0.0, patience=5.0, health_every=600.0))
    with engine:
        engine.load(versions[2], 2)
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        replicas[0].faults.append(EngineVersionError("another process"))
        (generation,) = engine.generate([[1, 2]], 3, [])
        assert generation.version == 2 and generation.tokens.tolist() == [2, 2, 2]


async def _complete_impatiently(engine: VllmEngine) -> None:
    object.__setattr__(engine.settings, "patience", 0.05)
    try:
        await engine._generate(CompletionRequest((1,), 2, ()))
    finally:
        object.__setattr__(engine.settings, "patience", 5.0)


def test_update_that_no_replica_takes_changes_nothing(versions: list[Path], tmp_path: Path) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        engine.load(versions[1], 1)
        for replica in replicas:
            replica.refused = {versions[2]}
        with pytest.raises(EngineVersionError, match="version 1 serves on"):
            engine.load(versions[2], 2)
        assert all(state.serving for state in engine._replicas.states), "they serve again before the error is raised"
        assert engine.version == 1 and set(engine.generate([[1]], 4, [])[0].tokens.tolist()) == {1}
        with pytest.raises(EngineVersionError):
            engine.load(versions[3], 2)
        (tmp_path / "config.json").write_text("{}")
        write_publication(tmp_path, 2)
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(CheckpointError):
            engine.load(tmp_path, 2)
        assert engine.version == 1


def test_replica_that_fails_alone_is_updated_later(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions)
    with engine:
        replicas[0].refused = {versions[1]}
        engine.load(versions[1], 1)
        assert engine.version == 1
        for _ in range(20):
            assert set(engine.generate([[1]], 3, [])[0].tokens.tolist()) == {1}
        replicas[0].refused = set()
        wait_until(lambda: engine._replicas.states[0].serving)
        assert replicas[0].held == versions[1]


def test_refusal_is_not_repeated(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions, 1)
    with engine:
        replicas[0].faults.append(EngineError("bad request"))
        with pytest.raises(EngineError, match="bad request"):
            engine.generate([[1]], 3, [])
        assert replicas[0].completions == 1 and not engine.faults
        for prompt, limit in (([], 3), ([1, VOCAB], 3), ([-1], 3), ([1], 0), ([1] * 60, 5)):
            with pytest.raises(RolloutError):
                engine.generate([prompt], limit, [])
        assert replicas[0].completions == 1


def test_cancelled_call_is_cancelled_on_its_replica(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions, 1)

    async def give_up() -> None:
        call = asyncio.create_task(engine.agenerate([1], 63, []))
        while not engine._replicas.states[0].calls:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while engine._replicas.states[0].calls:
            await asyncio.sleep(0.001)

    with engine:
        replicas[0]._open.clear()
        asyncio.run(asyncio.wait_for(give_up(), 10))


def test_calls_are_spread_and_turns_stay_with_their_prefix(versions: list[Path]) -> None:
    engine, replicas = make_engine(versions, 3)
    with engine:
        engine.generate([[i % VOCAB] * 8 for i in range(30)], 4, [])
        assert max(r.completions for r in replicas) - min(r.completions for r in replicas) <= 1
        start = [7] * 32
        (first,) = engine.generate([start], 4, [])
        before = [replica.completions for replica in replicas]
        for turn in range(5):
            engine.generate([[*start, *first.tokens.tolist(), turn]], 4, [])
        assert sorted(r.completions - b for r, b in zip(replicas, before, strict=True)) == [0, 0, 5]


def test_affinity_finds_the_longest_remembered_prefix() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity(block=4, capacity=3)
    affinity.remember([1, 2, 3, 4], "a")
    affinity.remember([1, 2, 3, 4, 5, 6, 7, 8, 9], "b")
    assert affinity.find([1, 2, 3, 4, 5, 6, 7, 8, 0, 0]) == "b"
    assert (
        affinity.find([1, 2, 3, 4, 5, 6]) == "a"
        and affinity.find([1, 2, 3]) is None
        and affinity.find([4, 3, 2, 1]) is None
    )
    for i in range(3):
        affinity.remember([i + 20] * 4, "c")
    assert affinity.find([1, 2, 3, 4]) is None


def test_engine_without_replicas_or_with_a_bad_temperature_is_refused(versions: list[Path]) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        VllmEngine([], versions[0])
    with pytest.raises(ConfigError, match="temperature"):
        VllmEngine([CountingReplica("r", versions[0])], versions[0], temperature=0)
