"""Weight updates of a real vLLM: proven by scoring, one version per generation, and taken back when they fail."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from megatron_rl.engines import Generation
from megatron_rl.engines.canary import Canary, mean_k3
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.errors import CheckpointError, EngineVersionError
from tests.vllm.conftest import CANARY_TOKENS, Published
from tests.vllm.proxy import FaultProxy
from tests.vllm.test_agreement import Kept

CALLS, LONG = 8, 150


@pytest.fixture(params=["embedded", "server"])
def replica(request: pytest.FixtureRequest):
    """Each way to reach a vLLM, and the canary's bound for its precision."""
    if request.param == "embedded":
        return Kept(request.getfixturevalue("embedded")), 1e-6
    proxy: FaultProxy = request.getfixturevalue("proxy")
    return HttpReplica(proxy.url), 0.01


def holds(engine: VllmEngine, path, bound: float) -> bool:
    """Whether the engine scores as the trainer did with these weights."""
    return mean_k3(Canary.read(path).logprobs, engine.score(CANARY_TOKENS)) < bound


def test_update_is_proven_by_scoring(replica, published: Published) -> None:
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
def test_generation_in_flight_has_one_version(embedded, published: Published, finish: bool) -> None:
    prompts = [[(5 * row + i) % 90 for i in range(3 + 6 * row)] for row in range(CALLS)]
    with VllmEngine([Kept(embedded)], published.v0, settings=ReplicaSetSettings(finish_calls=finish)) as engine:
        found = played_through(engine, embedded, prompts, published)
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


def wait_until_sampling(embedded, calls: int) -> None:
    """Until so many calls have three tokens each."""
    deadline, states = time.monotonic() + 60, embedded._engine.output_processor.request_states
    while len(states) < calls or min(len(state.detokenizer.output_token_ids) for state in list(states.values())) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def played_through(engine, embedded, prompts: list[list[int]], published: Published) -> list[list[Generation]]:
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
    wait_until_sampling(embedded, len(prompts))
    engine.load(published.v1, 1)
    player.join(60)
    return found


def test_update_that_broke_off_is_repaired_by_the_next(embedded, published: Published) -> None:
    """It ended between two layers, where nobody could clean up: some layers are new, one waits, none may stay so."""
    from megatron_rl.hf.reader import SafetensorsReader

    def break_off(worker) -> None:
        files = SafetensorsReader(published.v1)
        names = [name for name in files.names() if "layers.2.mlp.experts.7" not in name]
        worker.start_weight_update()
        worker.weight_transfer_engine.model.load_weights((name, files.read(name)) for name in names)

    with VllmEngine([Kept(embedded)], published.v0) as engine:
        engine._call(embedded._do(lambda: embedded._llm.collective_rpc(break_off)))
        engine.load(published.v0, 0)
        assert holds(engine, published.v0, 1e-6)
        assert engine._call(embedded.differing(published.v0)) == []
