"""The pool's promises, with replicas that only count: one version per generation, one result per call, the lost found.

A real vLLM keeps the same promises in tests/vllm; here thousands of interleavings are cheap.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines import Generation
from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.tiny import TinyShape
from megatron_rl.engines.vllm.completion import Completion, CompletionRequest
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.prefix_affinity import PrefixAffinity
from megatron_rl.engines.vllm.replica import Description, Footprint
from megatron_rl.errors import (
    CheckpointError,
    ConfigError,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    EngineVersionError,
    RolloutError,
)

VOCAB, VERSIONS = 32, 4
FAST = ReplicaSetSettings(attempts=8, backoff=0.0, patience=5.0, health_every=0.01)


class CountingReplica:
    """Samples the number of the directory it holds, one token a moment; holds back calls while paused. Asleep it holds
    nothing, and fails whoever asks for what needs weights."""

    def __init__(self, name: str, directory: Path, seed: int = 0) -> None:
        self.name, self._start, self._random = name, directory, random.Random(seed)
        self.faults: list[Exception] = []
        self.asked = self.slept = self.looks = 0
        self.refused = set[Path]()
        self.seeds: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Lose everything that a process loses."""
        self.held, self._tag, self._open, self.up = self._start, "default", asyncio.Event(), True
        self._open.set()
        self._cut, self.asleep = asyncio.Event(), False

    def _check(self) -> None:
        if not self.up:
            raise EngineUnavailableError("down", file=self.name)
        assert not self.asleep, "asked while asleep"

    async def ask(self, question: CompletionRequest, temperature: float) -> Completion:
        self.asked += 1
        await asyncio.sleep(self._random.random() / 1000)
        self._check()
        if self.faults:
            raise self.faults.pop(0)
        await self._open.wait()
        cut, tokens = self._cut, []
        while len(tokens) < question.max_new_tokens and not cut.is_set():
            self._check()
            tokens.append(int(self.held.name))
            await asyncio.sleep(0)
        finish = "length" if len(tokens) == question.max_new_tokens else "abort"
        rows = max(len(question.prompt) + len(tokens) - 1, 0)
        return Completion(tokens, [-1.0] * len(tokens), finish, np.tile(np.array([0, 1], np.uint8), (rows, 4, 1)))

    async def score(self, tokens: list[int]) -> list[float]:
        self._check()
        return [0.0] + [-float(self.held.name)] * (len(tokens) - 1)

    async def describe(self) -> Description:
        return Description("0", 64, can_sleep=True)

    async def tag(self) -> str:
        if not self.up:
            raise EngineUnavailableError("down", file=self.name)
        return self._tag

    async def set_tag(self, tag: str) -> None:
        self._tag = tag

    async def pause(self) -> None:
        if not self.asleep:
            self._check()
        self._open.clear()
        self._cut.set()

    async def resume(self) -> None:
        self._check()
        self._cut = asyncio.Event()
        self._open.set()

    async def load(self, directory: Path, tag: str) -> None:
        self._check()
        assert not self._open.is_set(), "loaded while calls run"
        # Replicas do not finish together: a fast one must not serve before the pool says so.
        await asyncio.sleep(self._random.random() / 100)
        if directory in self.refused:
            raise EngineUnavailableError("cannot load", file=self.name)
        self.held, self._tag = directory, tag

    async def differing(self, directory: Path) -> list[str]:
        self._check()
        return [] if directory == self.held else ["norm"]

    async def sleep(self) -> Footprint:
        self._check()
        assert not self._open.is_set(), "sent to sleep while calls run"
        await asyncio.sleep(self._random.random() / 100)
        self.held, self.asleep = Path("nothing"), True
        self.slept += 1
        return Footprint(100 + self.slept, 10)

    async def wake(self) -> None:
        if not self.up:
            raise EngineUnavailableError("down", file=self.name)
        self.asleep = False
        self._open.clear()

    async def sleeps(self) -> bool:
        if not self.up:
            raise EngineUnavailableError("down", file=self.name)
        self.looks += 1
        return self.asleep

    async def reseed(self, seed: int) -> None:
        self._random.seed(seed)
        self.seeds.append(seed)

    async def close(self) -> None:
        self.up = False


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories named by their version."""
    folder = tmp_path_factory.mktemp("versions")
    config = TinyShape().hf_config(VOCAB).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    paths = [folder / str(version) for version in range(VERSIONS)]
    for version, path in enumerate(paths):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        write_publication(path, version)
    return paths


def pool(versions: list[Path], count: int = 2, settings: ReplicaSetSettings = FAST) -> tuple[VllmEngine, list]:
    replicas = [CountingReplica(f"r{i}", versions[0], i) for i in range(count)]
    return VllmEngine(replicas, versions[0], settings=settings), replicas


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), finish=st.booleans(), count=st.integers(1, 3))
def test_a_generation_has_one_version_and_every_call_one_result(versions, seed: int, finish: bool, count: int) -> None:
    rng = random.Random(seed)
    engine, replicas = pool(
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


def test_lost_replica_comes_back_only_with_the_right_weights(versions: list[Path]) -> None:
    engine, replicas = pool(versions, 1)
    with engine:
        engine.load(versions[2], 2)
        replicas[0].up = False
        with pytest.raises(EngineUnavailableError):
            engine._call(asyncio.wait_for(_impatient(engine), 1))
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        (generation,) = engine.generate([[1, 2]], 3, [])
        assert generation.version == 2 and generation.tokens.tolist() == [2, 2, 2]
        assert replicas[0].held == versions[2]


def test_replica_that_was_restarted_unnoticed_is_proven_before_it_serves(versions: list[Path]) -> None:
    """No look at it is due: the answer's foreign process name is all there is."""
    engine, replicas = pool(versions, 1, ReplicaSetSettings(backoff=0.0, patience=5.0, health_every=600.0))
    with engine:
        engine.load(versions[2], 2)
        engine._loop.call_soon_threadsafe(replicas[0].restart)
        replicas[0].faults.append(EngineVersionError("another process"))
        (generation,) = engine.generate([[1, 2]], 3, [])
        assert generation.version == 2 and generation.tokens.tolist() == [2, 2, 2]


async def _impatient(engine: VllmEngine) -> None:
    object.__setattr__(engine.settings, "patience", 0.05)
    try:
        await engine._answer(CompletionRequest((1,), 2, ()))
    finally:
        object.__setattr__(engine.settings, "patience", 5.0)


def test_update_that_none_takes_changes_nothing(versions: list[Path], tmp_path: Path) -> None:
    engine, replicas = pool(versions)
    with engine:
        engine.load(versions[1], 1)
        for replica in replicas:
            replica.refused = {versions[2]}
        with pytest.raises(EngineVersionError, match="version 1 serves on"):
            engine.load(versions[2], 2)
        assert all(state.serving for state in engine._replicas.states), "taken back before the error is raised"
        assert engine.version == 1 and set(engine.generate([[1]], 4, [])[0].tokens.tolist()) == {1}
        with pytest.raises(EngineVersionError):
            engine.load(versions[3], 2)
        (tmp_path / "config.json").write_text("{}")
        write_publication(tmp_path, 2)
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(CheckpointError):
            engine.load(tmp_path, 2)
        assert engine.version == 1


def test_replica_that_fails_alone_is_left_behind_until_it_follows(versions: list[Path]) -> None:
    engine, replicas = pool(versions)
    with engine:
        replicas[0].refused = {versions[1]}
        engine.load(versions[1], 1)
        assert engine.version == 1
        for _ in range(20):
            assert set(engine.generate([[1]], 3, [])[0].tokens.tolist()) == {1}
        replicas[0].refused = set()
        deadline = 200
        while not engine._replicas.states[0].serving and deadline:
            engine._call(asyncio.sleep(0.02))
            deadline -= 1
        assert replicas[0].held == versions[1] and engine._replicas.states[0].serving


def test_refusal_is_not_repeated(versions: list[Path]) -> None:
    engine, replicas = pool(versions, 1)
    with engine:
        replicas[0].faults.append(EngineError("bad request"))
        with pytest.raises(EngineError, match="bad request"):
            engine.generate([[1]], 3, [])
        assert replicas[0].asked == 1 and not engine.faults
        for prompt, limit in (([], 3), ([1, VOCAB], 3), ([-1], 3), ([1], 0), ([1] * 60, 5)):
            with pytest.raises(RolloutError):
                engine.generate([prompt], limit, [])
        assert replicas[0].asked == 1


def test_cancelled_call_ends_its_work(versions: list[Path]) -> None:
    engine, replicas = pool(versions, 1)

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


def test_load_is_shared_and_turns_stay_with_their_prefix(versions: list[Path]) -> None:
    engine, replicas = pool(versions, 3)
    with engine:
        engine.generate([[i % VOCAB] * 8 for i in range(30)], 4, [])
        assert max(r.asked for r in replicas) - min(r.asked for r in replicas) <= 1
        start = [7] * 32
        (first,) = engine.generate([start], 4, [])
        before = [replica.asked for replica in replicas]
        for turn in range(5):
            engine.generate([[*start, *first.tokens.tolist(), turn]], 4, [])
        assert sorted(r.asked - b for r, b in zip(replicas, before, strict=True)) == [0, 0, 5]


def test_affinity_finds_the_longest_known_beginning() -> None:
    places: PrefixAffinity[str] = PrefixAffinity(block=4, capacity=3)
    places.remember([1, 2, 3, 4], "a")
    places.remember([1, 2, 3, 4, 5, 6, 7, 8, 9], "b")
    assert places.find([1, 2, 3, 4, 5, 6, 7, 8, 0, 0]) == "b"
    assert (
        places.find([1, 2, 3, 4, 5, 6]) == "a" and places.find([1, 2, 3]) is None and places.find([4, 3, 2, 1]) is None
    )
    for i in range(3):
        places.remember([i + 20] * 4, "c")
    assert places.find([1, 2, 3, 4]) is None


def test_pool_refuses_what_cannot_work(versions: list[Path]) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        VllmEngine([], versions[0])
    with pytest.raises(ConfigError, match="temperature"):
        VllmEngine([CountingReplica("r", versions[0])], versions[0], temperature=0)
