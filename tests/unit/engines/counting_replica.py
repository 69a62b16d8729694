"""A vLLM replica that only counts, and an engine over several of them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.tiny import TinyShape
from megatron_rl.engines.vllm.completion import Completion, CompletionRequest
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.replica import Description, Footprint
from megatron_rl.errors import EngineUnavailableError

VOCAB, VERSIONS = 32, 4
FAST = ReplicaSetSettings(attempts=8, backoff=0.0, patience=5.0, health_every=0.01)


class CountingReplica:
    """Samples the number of the directory whose weights it holds, one token a moment; holds back calls while paused.

    Asleep it holds no weights, and every call that needs them fails an assertion.
    """

    def __init__(self, name: str, directory: Path, seed: int = 0) -> None:
        self.name, self._start, self._random = name, directory, random.Random(seed)
        self.faults: list[Exception] = []
        self.completions = self.slept = self.sleep_checks = 0
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
        assert not self.asleep, "called while asleep"

    async def complete(self, request: CompletionRequest, temperature: float) -> Completion:
        self.completions += 1
        await asyncio.sleep(self._random.random() / 1000)
        self._check()
        if self.faults:
            raise self.faults.pop(0)
        await self._open.wait()
        cut, tokens = self._cut, []
        while len(tokens) < request.max_new_tokens and not cut.is_set():
            self._check()
            tokens.append(int(self.held.name))
            await asyncio.sleep(0)
        finish = "length" if len(tokens) == request.max_new_tokens else "abort"
        rows = max(len(request.prompt) + len(tokens) - 1, 0)
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
        # Replicas do not finish together: a fast one must not serve before the whole set does.
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

    async def is_sleeping(self) -> bool:
        if not self.up:
            raise EngineUnavailableError("down", file=self.name)
        self.sleep_checks += 1
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


def make_engine(versions: list[Path], count: int = 2, settings: ReplicaSetSettings = FAST) -> tuple[VllmEngine, list]:
    """An engine over `count` replicas at version 0."""
    replicas = [CountingReplica(f"r{i}", versions[0], i) for i in range(count)]
    return VllmEngine(replicas, versions[0], settings=settings), replicas
