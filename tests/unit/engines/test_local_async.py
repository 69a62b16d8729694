"""The embedded engine for concurrent callers: the same tokens as alone, one version a call, updates checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.engines.canary import Canary
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.local_async import LocalAsyncEngine
from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.frozen_lake import lake_vocabulary
from megatron_rl.errors import CheckpointError, EngineVersionError, RolloutError

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [1, 2, 3, 4, 5]]
STOPS = (0,)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions, the second with a canary."""
    found = []
    for version in (0, 1):
        path = tmp_path_factory.mktemp("weights") / f"version-{version:06d}"
        write_tiny_checkpoint(path, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2), seed=version)
        write_publication(path, version)
        found.append(path)
    tokens = np.array([1, 5, 9, 2, 7], np.int32)
    Canary(tokens, LocalEngine(found[1]).score(tokens)).write(found[1])
    return found


def generate_all(engine: LocalAsyncEngine, **options):
    async def calls():
        return await asyncio.gather(*(engine.agenerate(prompt, 4, STOPS, **options) for prompt in PROMPTS))

    return calls()


def test_concurrent_calls_return_what_single_calls_do(published: list[Path]) -> None:
    alone = LocalEngine(published[0])
    generations = asyncio.run(generate_all(LocalAsyncEngine(LocalEngine(published[0])), greedy=True))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        (expected,) = alone.generate([prompt], 4, STOPS, greedy=True)
        assert generation.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(generation.logprobs, expected.logprobs, atol=1e-5)
        assert generation.version == 0 and generation.routes.shape == expected.routes.shape


def test_calls_of_several_kinds_are_all_answered(published: list[Path]) -> None:
    engine = LocalAsyncEngine(LocalEngine(published[0]), max_batch=2)

    async def run():
        calls = [engine.agenerate(p, n, STOPS, g) for p in PROMPTS for n in (1, 3) for g in (False, True)]
        return await asyncio.gather(*calls)

    assert [len(generation.tokens) <= 3 for generation in asyncio.run(run())] == [True] * 20


def test_an_update_between_calls_is_seen_in_the_version(published: list[Path]) -> None:
    engine = LocalAsyncEngine(LocalEngine(published[0], temperature=0.7))

    async def run():
        before = [asyncio.create_task(engine.agenerate(prompt, 4, STOPS)) for prompt in PROMPTS]
        await engine.update(published[1], 1)
        return await asyncio.gather(*before), await generate_all(engine)

    before, after = asyncio.run(run())
    assert {generation.version for generation in before} <= {0, 1} and {generation.version for generation in after} == {
        1
    }


@pytest.mark.parametrize("fault", ["weights", "canary"])
def test_weights_that_are_not_the_trainers_are_refused_and_the_old_serve_on(
    published: list[Path], tmp_path: Path, fault: str
) -> None:
    bad = tmp_path / "version-000002"
    write_tiny_checkpoint(bad, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2), seed=2)
    write_publication(bad, 2)
    if fault == "weights":
        file = bad / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    canary = Canary.read(published[1])
    canary.write(bad)
    engine = LocalAsyncEngine(LocalEngine(published[0]))

    async def run():
        with pytest.raises(CheckpointError if fault == "weights" else EngineVersionError):
            await engine.update(bad, 2)
        return await generate_all(engine)

    assert {generation.version for generation in asyncio.run(run())} == {0} and engine.version == 0


def test_an_error_reaches_its_callers_only(published: list[Path]) -> None:
    engine = LocalAsyncEngine(LocalEngine(published[0]))

    async def run():
        bad = asyncio.create_task(engine.agenerate([99], 4, STOPS))
        good = asyncio.create_task(engine.agenerate([1], 3, STOPS))
        with pytest.raises(RolloutError):
            await bad
        return await good

    assert asyncio.run(run()).version == 0


def test_closing_cancels_waiting_calls(published: list[Path]) -> None:
    engine = LocalAsyncEngine(LocalEngine(published[0]))

    async def run():
        tasks = [asyncio.create_task(engine.agenerate(prompt, 4, STOPS)) for prompt in PROMPTS]
        await asyncio.sleep(0)
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    results = asyncio.run(run())
    assert all(isinstance(found, asyncio.CancelledError) for found in results)
