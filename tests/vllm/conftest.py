"""Real engines, made once: a float32 one in this process, a bfloat16 server, and published versions of a tiny model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_rl.engines.canary import Canary, mean_k3
from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.engines.vllm.options import VllmOptions, vllm_environment
from megatron_rl.engines.vllm.server import LocalServer
from megatron_rl.environments.frozen_lake import lake_vocabulary
from megatron_rl.environments.vocabulary import Vocabulary
from tests.vllm import trainer
from tests.vllm.proxy import FaultProxy

if TYPE_CHECKING:
    from megatron_rl.engines.vllm.engine import VllmEngine
    from megatron_rl.engines.vllm.inprocess_replica import InProcessReplica
    from tests.dist.pool import RankPool

VOCAB = 96
SHAPE = TinyShape(head_dim=32, dense_layers=(1,), init_std=0.1)
"""vLLM's CPU attention needs heads of 32 at least. A dense layer, so that MoE layers are not simply all layers."""
CANARY_TOKENS = [(7 * i) % VOCAB for i in range(1, 33)]

# Before anything imports torch's compiler here; servers inherit it.
os.environ |= vllm_environment()
# Two processes instead of three for a server, and none bound to a core that the others need.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vllm, say so and skip."""
    if importlib.util.find_spec("vllm") is None:
        reason = pytest.mark.skip(reason="vllm is not installed here: `make test-vllm` has an environment with it")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(reason)


@dataclass(frozen=True)
class Published:
    """Versions 0 and 1 as the trainer would publish them, and three that must be refused."""

    v0: Path
    v1: Path
    liar: Path
    """Weights of version 0 as version 2, with the canary of version 1."""
    torn: Path
    """Version 3, altered after it was published."""
    partial: Path
    """Version 4, whose manifest fits, but which lacks a tensor of the model."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The directories with weights, not yet published."""
    folder, words = tmp_path_factory.mktemp("weights"), Vocabulary([f"w{i}" for i in range(VOCAB)])
    made = Published(*(folder / field.name for field in fields(Published)))
    for field in fields(Published):
        write_tiny_checkpoint(getattr(made, field.name), words, SHAPE, seed=1 if field.name == "v1" else 0)
    _drop_tensor(made.partial / "model.safetensors")
    return made


@pytest.fixture(scope="session")
def published(checkpoints: Published, request: pytest.FixtureRequest, ranks: RankPool) -> Published:
    """The same with manifests, and canaries of the real trainer. The server, if one is needed, starts meanwhile."""
    if any("proxy" in item.fixturenames or "[server" in item.name for item in request.session.items):
        request.getfixturevalue("server")
    first, second = (
        ranks.run(trainer.canary, 1, str(path), CANARY_TOKENS)[0] for path in (checkpoints.v0, checkpoints.v1)
    )
    for version, field in enumerate(fields(Published)):
        path = getattr(checkpoints, field.name)
        (second if field.name in ("v1", "liar") else first).write(path)
        write_publication(path, version)
    _flip_byte(checkpoints.torn / "model.safetensors")
    return checkpoints


def lake_model(path: Path) -> Path:
    """A tiny policy of the frozen lake."""
    # vLLM has no CPU kernel for smaller attention heads.
    shape = TinyShape(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, moe_hidden_size=32)
    write_tiny_checkpoint(path, lake_vocabulary(), shape)
    return path


def options(model: Path, dtype: str, **more: object) -> VllmOptions:
    """A vLLM as small as it gets."""
    sizes = dict(max_model_len=256, max_num_seqs=16, kv_cache_bytes=64 << 20)
    executor = dict(extra={"distributed_executor_backend": "uni"})
    return VllmOptions(model, dtype=dtype, **(sizes | executor | more))


@pytest.fixture(scope="session")
def inprocess(published: Published) -> InProcessReplica:
    """A float32 engine in this process. Tests leave any weights in it: a `VllmEngine` loads its own."""
    from megatron_rl.engines.vllm.inprocess_replica import InProcessReplica

    return InProcessReplica(options(published.v0, "float32"))


@pytest.fixture(scope="session")
def server(checkpoints: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A bfloat16 server that starts in the background: `server.wait()` before use."""
    started = LocalServer(options(checkpoints.v0, "bfloat16"), tmp_path_factory.mktemp("server") / "server.log")
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def proxy(server: LocalServer) -> Iterator[FaultProxy]:
    """In front of the server, which answers from here on."""
    server.wait()
    started = FaultProxy(server.url)
    yield started
    started.close()


class KeepOpen:
    """A replica that stays open when an engine over it is closed."""

    def __init__(self, replica) -> None:
        self._replica = replica

    def __getattr__(self, name: str):
        return getattr(self._replica, name)

    async def close(self) -> None:
        """Only accept calls again."""
        await self._replica.resume()


def holds(engine: VllmEngine, weights: Path, bound: float) -> bool:
    """Whether the engine scores these weights' canary as the trainer did, up to a mean k3 of `bound` nats."""
    canary = Canary.read(weights)
    assert canary is not None
    return mean_k3(canary.logprobs, engine.score(CANARY_TOKENS)) < bound


def _flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _drop_tensor(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    del tensors["model.layers.2.mlp.experts.3.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
