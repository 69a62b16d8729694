"""Bad days of one real server: every fault is survived or named, and nothing wrong is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.errors import EngineAnswerError, EngineError, EngineUnavailableError, EngineVersionError
from tests.vllm import proxy as faults
from tests.vllm.conftest import Published
from tests.vllm.proxy import FaultProxy

FAULTS = {
    "no routes": (faults.no_routes, EngineAnswerError, "routed_experts"),
    "too few rows": (faults.too_few_rows, EngineAnswerError, "routed_experts"),
    "missing layer": (faults.missing_layer, EngineAnswerError, "routed_experts"),
    "nan": (faults.nan_logprob, EngineAnswerError, "logprobs"),
    "restarted": (faults.other_process, EngineVersionError, "restarted"),
    "500": ("error", EngineUnavailableError, "500"),
    "hang": ("hang", EngineUnavailableError, "no answer in time"),
    "dropped": ("drop", EngineUnavailableError, "connection"),
}
SETTINGS = ReplicaSetSettings(attempts=3, backoff=0.01, patience=20, health_every=0.3, max_k3=0.01, start_timeout=30)


@pytest.fixture
def engine(proxy: FaultProxy, published: Published) -> Iterator[VllmEngine]:
    """An engine whose calls may take two seconds."""
    with VllmEngine([HttpReplica(proxy.url, timeout=2.0)], published.v0, settings=SETTINGS) as made:
        proxy.sampled = 0
        yield made
    proxy.faults.clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_survived_once(engine: VllmEngine, proxy: FaultProxy, fault: str) -> None:
    spoil, kind, _ = FAULTS[fault]
    proxy.faults[:] = [spoil]
    (generation,) = engine.generate([[4, 5, 6]], 8, [])
    assert generation.routes.shape == (3, 10, 2) and generation.version == 0
    # `HttpReplica` itself repeats a call whose connection breaks; the engine counts everything else.
    assert proxy.sampled == 2 and engine.faults[kind.__name__] == (fault != "dropped"), engine.faults


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_stays_is_named(engine: VllmEngine, proxy: FaultProxy, fault: str) -> None:
    spoil, kind, named = FAULTS[fault]
    proxy.faults[:] = [spoil] * 6
    with pytest.raises(kind, match=named) as raised:
        engine.generate([[4, 5, 6]], 8, [])
    assert isinstance(raised.value, EngineError) and raised.value.retriable == (kind is EngineUnavailableError)
    proxy.faults.clear()
    assert len(engine.generate([[4, 5, 6]], 8, [])[0].tokens) == 8, "the engine is back"


def test_weights_changed_behind_our_back_do_not_serve(engine: VllmEngine, server, published: Published) -> None:
    """Another client's update changes the tag: the next health check finds it and loads the current weights."""
    other = HttpReplica(server.url)

    async def take_over() -> None:
        await other.load(published.v1, "somebody else's")
        await other.close()

    engine._call(take_over())
    deadline = time.monotonic() + 20
    while not engine.faults and engine._call(current_tag(engine)) != engine._replicas.weights.tag:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert engine._call(engine._replicas.states[0].replica.differing(published.v0)) == []


async def current_tag(engine: VllmEngine) -> str:
    """What the server calls its weights now."""
    return await engine._replicas.states[0].replica.tag()
