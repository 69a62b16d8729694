"""Weight updates of a real vLLM: verified by scoring, one version a generation, and undone when they fail."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from megatron_rl.engines import Generation
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.errors import CheckpointError, EngineVersionError
from tests.vllm.conftest import CANARY_TOKENS, KeepOpen, Published, holds
from tests.vllm.proxy import FaultProxy
from tests.waiting import wait_until

CALLS, LONG = 8, 150


@pytest.fixture(params=["inprocess", "server"])
def replica(request: pytest.FixtureRequest):
    """Each kind of replica, and the bound on the canary's mean k3 for its precision."""
    if request.param == "inprocess":
        return KeepOpen(request.getfixturevalue("inprocess")), 1e-6
    proxy: FaultProxy = request.getfixturevalue("proxy")
    return HttpReplica(proxy.url), 0.01


def test_update_is_verified_by_scoring(replica, published: Published) -> None:
    replica, bound = replica
    with VllmEngine([replica], published.v0, settings=ReplicaSetSettings(max_k3=bound)) as engine:
        assert holds(engine, published.v0, bound)
        # Stored prefixes of the old weights must not survive: the same tokens are scored again.
        engine.load(published.v1, 1)
        assert engine.version == 1 and holds(engine, published.v1, bound) and not holds(engine, published.v0, bound)
        assert engine.generate([CANARY_TOKENS], 4, [])[0].version == 1


@pytest.mark.parametrize(
    ("name", "version", "error"),
    [("liar", 2, EngineVersionError), ("torn", 3, CheckpointError), ("partial", 4, EngineVersionError)],
)
def test_bad_update_leaves_the_old_version(replica, published: Published, name: str, version: int, error) -> None:
    replica, bound = replica
    with VllmEngine([replica], published.v1, version=1, settings=ReplicaSetSettings(max_k3=bound)) as engine:
        with pytest.raises(error):
            engine.load(getattr(published, name), version)
        assert engine.version == 1 and holds(engine, published.v1, bound)
        (generation,) = engine.generate([CANARY_TOKENS], 4, [])
        assert generation.version == 1


@pytest.mark.parametrize("finish", [False, True], ids=["interrupt", "finish"])
def test_generation_in_flight_has_one_version(inprocess, published: Published, finish: bool) -> None:
    prompts = [[(5 * row + i) % 90 for i in range(3 + 6 * row)] for row in range(CALLS)]
    with VllmEngine([KeepOpen(inprocess)], published.v0, settings=ReplicaSetSettings(finish_calls=finish)) as engine:
        found = played_through(engine, inprocess, prompts, published)
        reference = {0: LocalEngine(published.v0), 1: LocalEngine(published.v1)}
        for prompt, parts in zip(prompts, found, strict=True):
            tokens = list(prompt)
            for part in parts:
                start, tokens = len(tokens), tokens + part.tokens.tolist()
                expected = reference[part.version].score(tokens)[start:]
                assert np.abs(part.logprobs - expected).max() < 1e-4
                assert part.routes.shape == (3, len(tokens) - 1, 2)
    versions = [[part.version for part in parts] for parts in found]
    assert [0] in versions if finish else [0, 1] in versions, versions


def wait_until_sampling(inprocess, calls: int) -> None:
    """Until so many calls have three tokens each."""
    states = inprocess._engine.output_processor.request_states

    def sampling() -> bool:
        lengths = [len(state.detokenizer.output_token_ids) for state in list(states.values())]
        return len(lengths) >= calls and min(lengths) >= 3

    wait_until(sampling, 60, pause=0.005)


def played_through(engine, inprocess, prompts: list[list[int]], published: Published) -> list[list[Generation]]:
    """Long calls with an update in the middle, each continued from its exact prefix."""
    found: list[list[Generation]] = []

    async def turn(prompt: list[int]) -> list[Generation]:
        parts, tokens = [], list(prompt)
        while not parts or parts[-1].interrupted:
            parts.append(await engine.agenerate(tokens, LONG - (len(tokens) - len(prompt)), []))
            tokens += parts[-1].tokens.tolist()
        return parts

    async def all_turns() -> None:
        found.extend(await asyncio.gather(*(turn(prompt) for prompt in prompts)))

    player = threading.Thread(target=lambda: asyncio.run(all_turns()))
    player.start()
    wait_until_sampling(inprocess, len(prompts))
    engine.load(published.v1, 1)
    player.join(60)
    return found


def test_update_that_broke_off_is_repaired_by_the_next(inprocess, published: Published) -> None:
    """It ended between two layers and was not cleaned up: some layers are new, and one waits for its weights."""
    from megatron_rl.hf.reader import SafetensorsReader

    def break_off(worker) -> None:
        files = SafetensorsReader(published.v1)
        names = [name for name in files.names() if "layers.2.mlp.experts.7" not in name]
        worker.start_weight_update()
        worker.weight_transfer_engine.model.load_weights((name, files.read(name)) for name in names)

    with VllmEngine([KeepOpen(inprocess)], published.v0) as engine:
        engine._call(inprocess._do(lambda: inprocess._llm.collective_rpc(break_off)))
        engine.load(published.v0, 0)
        assert holds(engine, published.v0, 1e-6)
        assert engine._call(inprocess.differing(published.v0)) == []
