"""The builders run for one rank of a 512-rank world in one process: fake process group, meta tensors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron_rl.backend import platform, topology
platform.install()
from megatron_rl.backend.model import build_chunks, transformer_config
from megatron_rl.config import ParallelConfig, PerformanceConfig
from megatron_rl.hf.config import HFModelConfig
dist.init_process_group("fake", store=FakeStore(), rank=int(sys.argv[1]), world_size=512)
parallel = ParallelConfig(tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11)
place = topology.initialize(parallel, seed=0, fake=True)
hf = HFModelConfig("qwen3_moe", "lm", 94, 4096, 64, 4, 128, 12288, 1536, 128, 8, True, tuple(range(94)), 1e6, 1e-6,
                   151936, False, 40960, 0.0, qk_norm="head")
out = {}
for role, shape in (("policy", hf), ("value", hf.as_critic())):
    config = transformer_config(shape, parallel, PerformanceConfig(), torch.bfloat16, meta=True)
    chunks = build_chunks(shape, config, place, role)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    out[role] = {"count": sum(p.numel() for p in parameters), "layers": sum(len(c.decoder.layers) for c in chunks),
                 "devices": sorted({p.device.type for p in parameters})}
print(json.dumps(out))
"""


@pytest.mark.parametrize(
    ("rank", "first", "last"),
    [
        pytest.param(0, True, False, marks=pytest.mark.full),
        (200, False, False),
        pytest.param(511, False, True, marks=pytest.mark.full),
    ],
)
def test_one_rank_of_512_of_a_235b_model(rank: int, first: bool, last: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(rank)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    hidden, vocab, heads, groups, width, experts, ffn, tensor, expert_ranks = 4096, 151936, 64, 4, 128, 128, 1536, 4, 16
    attention = hidden * width * (2 * heads + 2 * groups) // tensor + 2 * width
    layer = attention + 2 * hidden + hidden * experts + experts // expert_ranks * 3 * hidden * ffn
    layers = 11 if first or last else 12
    expected = layers * layer + first * vocab // tensor * hidden + last * hidden
    assert found["policy"] == {
        "count": expected + last * vocab // tensor * hidden, "layers": layers, "devices": ["meta"],
    }  # fmt: skip
    assert found["value"] == {"count": expected + last * hidden, "layers": layers, "devices": ["meta"]}
