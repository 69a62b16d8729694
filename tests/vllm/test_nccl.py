"""Weights over NCCL, from a one-rank trainer on one GPU to a server on another."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.engines.canary import Canary, require_canary
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.engines.vllm.server import LocalServer, free_port
from tests.vllm.conftest import CANARY_TOKENS, Published, options

pytestmark = [
    pytest.mark.full,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one for the trainer, one for vLLM"),
]


def test_weights_arrive_over_nccl(published: Published, tmp_path: Path) -> None:
    nccl = options(published.v0, "bfloat16", extra={"weight_transfer_config": {"backend": "nccl"}})
    with LocalServer(nccl, tmp_path / "server.log", environment={"CUDA_VISIBLE_DEVICES": "1"}) as server:
        _send(server.url, published.v1)
        scores = asyncio.run(_resume_and_score(server.url))
    require_canary(Canary.read(published.v1), scores, 0.01, who=server.url)


def _send(url: str, weights: Path) -> None:
    from safetensors.torch import load_file

    from megatron_rl.engines.vllm.nccl import NcclSender

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    try:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights / "model.safetensors").items()}
        sender = NcclSender([url], lambda: iter(tensors.items()), address="127.0.0.1", port=free_port())
        asyncio.run(_pause(url))
        sender.send("1")
        sender.close()
    finally:
        dist.destroy_process_group()


async def _pause(url: str) -> None:
    replica = HttpReplica(url)
    await replica.pause()
    await replica.close()


async def _resume_and_score(url: str) -> list[float]:
    replica = HttpReplica(url)
    await replica.resume()
    scores = await replica.score(CANARY_TOKENS)
    await replica.close()
    return scores
