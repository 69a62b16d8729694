"""Servers that die in the middle of episodes, and two of them sharing the work. Minutes: only in the full run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.engines.canary import Canary, check_canary
from megatron_rl.engines.vllm.completion import CompletionRequest
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.engines.vllm.server import LocalServer
from megatron_rl.engines.vllm.server_group import ServerGroup
from megatron_rl.errors import LaunchError
from tests.vllm.conftest import VOCAB, Published, options
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PATIENT = ReplicaSetSettings(attempts=6, patience=400, health_every=1.0)
TURNS = 16
"""Of 14 tokens after 20: they fit into a context of 256."""


def episodes(engine: VllmEngine, count: int, played: list[int], seed: int = 0) -> list[list[int]]:
    """Play so many token sequences of TURNS turns at a time; each turn continues the exact prefix and is counted."""
    rng = np.random.default_rng(seed)
    starts = [rng.integers(0, VOCAB, 20).tolist() for _ in range(count)]

    async def one(tokens: list[int]) -> list[int]:
        versions = []
        for _ in range(TURNS):
            generation = await engine.agenerate(tokens, 12, [])
            tokens = [*tokens, *generation.tokens.tolist(), 1, 2]
            versions.append(generation.version)
            played.append(generation.version)
        return versions

    async def play() -> list[list[int]]:
        return list(await asyncio.gather(*(one(start) for start in starts)))

    return asyncio.run(play())


@pytest.mark.parametrize("servers", [1, 2])
def test_killed_server_is_restarted_and_serves_again(published: Published, tmp_path: Path, servers: int) -> None:
    """The weights are version 1 by then; the restarted server begins with version 0 and must not serve it."""
    with ServerGroup(options(published.v0, "float32"), tmp_path, [{}] * servers) as group:
        replicas = [HttpReplica(url, timeout=60) for url in group.urls]
        with VllmEngine(replicas, published.v0, settings=PATIENT) as engine:
            engine.load(published.v1, 1)
            calls = [state.complete(CompletionRequest((1, 2, 3), 16, ()), 1.0) for state in engine._replicas.states]
            sampled = [tuple(engine._call(call).tokens) for call in calls]
            assert len(set(sampled)) == servers, "started alike, they do not sample alike"
            found, played = [], []
            player = threading.Thread(target=lambda: found.extend(episodes(engine, 6, played)))
            player.start()
            while len(played) < 12:
                assert player.is_alive()
                time.sleep(0.01)
            os.killpg(group.servers[0]._process.pid, signal.SIGKILL)
            player.join(600)
            assert [set(turns) for turns in found] == [{1}] * 6 and engine.faults, "killed in the middle"
            all_serve = lambda: all(state.serving for state in engine._replicas.states)  # noqa: E731
            wait_until(all_serve, 300, pause=0.5, what=engine.faults)
            assert group.restarts == [1] + [0] * (servers - 1)
            assert check_canary(engine, Canary.read(published.v1), max_k3=1e-6) < 1e-6
            for state in engine._replicas.states:
                assert engine._call(state.replica.differing(published.v1)) == []


def test_server_that_cannot_start_says_why(published: Published, tmp_path: Path) -> None:
    with (
        pytest.raises(LaunchError, match="ended while starting"),
        LocalServer(options(published.v0, "float32", max_model_len=10**9), tmp_path / "server.log"),
    ):
        pass
