"""What only a GPU can show: Transformer Engine's spec, grouped GEMM, NCCL, and the CUDA kernels under our own code.

Each test runs its ranks through torchrun, because a forked rank process of the pool cannot use CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine, which is not installed"
)


def torchrun(case: str, ranks: int, *arguments: str) -> str:
    """Runs `case` of this file on `ranks` GPUs and returns rank 0's output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, case, *arguments], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_rl.engines.tiny import write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    path = tmp_path_factory.mktemp("gpu") / "tiny"
    write_tiny_checkpoint(path, lake_vocabulary())
    return path


def test_local_spec_on_cuda_agrees_with_transformers(tiny: Path) -> None:
    assert float(torchrun("logprobs", 1, str(tiny), "local").split()[-1]) <= 1e-4


@needs_te
@pytest.mark.parametrize("grouped", ["sequential", "grouped"])
def test_transformer_engine_agrees_with_transformers(tiny: Path, grouped: str) -> None:
    assert float(torchrun("logprobs", 1, str(tiny), grouped).split()[-1]) <= 5e-3


@needs_te
def test_transformer_engine_round_trip_is_bit_exact(tiny: Path, tmp_path: Path) -> None:
    torchrun("round_trip", min(torch.cuda.device_count(), 2), str(tiny), str(tmp_path / "out"))
    from safetensors.torch import load_file

    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "out", tiny))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_demo_learns_on_nccl(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/frozen_lake/demo.py"), "--output", str(tmp_path / "demo")]
    done = subprocess.run([*command, "--iterations", "3"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "success" in done.stdout


def _model(path: Path, kind: str):
    from megatron_rl.backend import platform, topology
    from megatron_rl.backend.model import build_model, transformer_config
    from megatron_rl.backend.weights import import_hf
    from megatron_rl.config import PerformanceConfig, parse_config
    from megatron_rl.hf.config import read_hf_config
    from megatron_rl.launch.environment import read_environment

    place = read_environment()
    if kind == "local":
        platform.have_transformer_engine = lambda: False
    topology.start_process_group(place.rank, place.world, init_method=f"tcp://{place.address}:{place.port}")
    layout = parse_config({"parallel": {"tensor": place.world}}).parallel
    topo, source = topology.initialize(layout, seed=0), read_hf_config(path)
    performance = PerformanceConfig(moe_grouped_gemm=kind == "grouped")
    model = build_model(source, transformer_config(source, layout, performance, torch.float32), topo, "policy")
    import_hf(model, str(path), source)
    return model, topo


def logprobs(path: str, kind: str) -> None:
    """Prints the largest difference from transformers' log-probs."""
    from transformers import AutoModelForCausalLM

    from megatron_rl.backend.micro_batch import RouteSpec, prepare_micro_batches
    from megatron_rl.backend.step import Readout, score
    from megatron_rl.batching import CostModel, actor_stream, plan_micro_batches

    model, topo = _model(Path(path), kind)
    ids = np.random.default_rng(0).integers(0, model.hf.vocab_size, 64).astype(np.int32)
    offsets, mask = np.array([0, 24, 64]), np.ones(64, bool)
    mask[[0, 24]] = False
    stream = actor_stream(ids, offsets, mask)
    plan = plan_micro_batches(stream.lengths, token_budget=64, data_ranks=1, cp=1, tp=1, cost=CostModel())
    layers = {layer: layer for layer in model.registry.layers}
    parts = prepare_micro_batches(stream, plan, topo, RouteSpec(None, layers, model.hf.num_experts, model.hf.topk))
    slots, readings = score(model, parts, plan.length, Readout())
    found = torch.empty(stream.slots, device="cuda")
    found[slots] = readings[0]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
    expected = []
    for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
        tokens = torch.as_tensor(ids[start:stop].astype(np.int64), device="cuda")[None]
        with torch.no_grad():
            table = reference(tokens).logits[0].log_softmax(-1)
        expected.append(table[:-1].gather(1, tokens[0, 1:, None])[:, 0])
    print(float((found - torch.cat(expected)).abs().max()))


def round_trip(path: str, target: str) -> None:
    """Import under Transformer Engine's names, export again."""
    from megatron_rl.training.weights import write_hf

    model, _ = _model(Path(path), "grouped")
    write_hf(model, Path(target), path)


if __name__ == "__main__":
    {"logprobs": logprobs, "round_trip": round_trip}[sys.argv[1]](*sys.argv[2:])
