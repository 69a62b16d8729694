"""vLLM's own sleep mode: the GPU's memory is really free meanwhile, and awake again it holds the version it serves."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM for GPUs, which is not installed"
)
KV_BYTES, TOKENS = 1 << 30, [(7 * i) % 90 for i in range(1, 33)]


@dataclass(frozen=True)
class Versions:
    """Two published ones."""

    v0: Path
    v1: Path


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    from megatron_rl.engines.publication import write_publication
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.vocabulary import Vocabulary

    folder, words = tmp_path_factory.mktemp("weights"), Vocabulary([f"w{i}" for i in range(96)])
    made = Versions(folder / "v0", folder / "v1")
    for number, path in enumerate((made.v0, made.v1)):
        write_tiny_checkpoint(path, words, TinyShape(head_dim=64, dense_layers=(1,), init_std=0.1), seed=number)
        write_publication(path, number)
    return made


@pytest.fixture(scope="module")
def engine(versions: Versions) -> Iterator:
    """An engine over one replica of this process, started with sleep mode."""
    from megatron_rl.engines.vllm.engine import VllmEngine
    from megatron_rl.engines.vllm.inprocess_replica import InProcessReplica
    from megatron_rl.engines.vllm.options import VllmOptions

    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": KV_BYTES}
    executor = {"distributed_executor_backend": "uni", "gpu_memory_utilization": 0.3}
    options = VllmOptions(versions.v0, dtype="bfloat16", can_sleep=True, extra=executor, **sizes)
    with VllmEngine([InProcessReplica(options)], versions.v0) as made:
        yield made


def test_the_device_is_free_and_the_same_completion_comes_back(engine, versions: Versions) -> None:
    engine.load(versions.v0, 0)
    (before,) = engine.generate([TOKENS], 24, [], greedy=True)
    assert engine.can_sleep
    awake = torch.cuda.mem_get_info()[0]
    found = engine.sleep()
    assert found.awake - found.asleep > 0.9 * KV_BYTES, found
    assert torch.cuda.mem_get_info()[0] - awake > 0.9 * KV_BYTES, "other processes can use it"
    (after,) = engine.generate([TOKENS], 24, [], greedy=True)
    assert np.array_equal(before.tokens, after.tokens) and np.array_equal(before.routes, after.routes)


def test_an_update_while_asleep_serves_the_new_version(engine, versions: Versions) -> None:
    engine.load(versions.v1, 1)
    expected = engine.score(TOKENS)
    engine.load(versions.v0, 0)
    other = engine.score(TOKENS)
    engine.sleep()
    engine.load(versions.v1, 1)
    assert engine.version == 1
    assert np.abs(engine.score(TOKENS) - expected).max() < 1e-2 < np.abs(other - expected).max()
