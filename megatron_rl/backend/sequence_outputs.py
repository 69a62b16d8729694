"""A model's outputs at every position of one sequence, on one rank: what a conversion is compared by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_rl.backend import platform, topology
from megatron_rl.backend.micro_batch import RouteSpec, prepare_micro_batches
from megatron_rl.backend.model import Model, Role, build_chunks, route_registry, transformer_config
from megatron_rl.backend.weights import import_hf
from megatron_rl.batching import CostModel, actor_stream, plan_micro_batches
from megatron_rl.config import ParallelConfig, PerformanceConfig
from megatron_rl.errors import LaunchError
from megatron_rl.hf.config import read_hf_config


@contextlib.contextmanager
def one_rank() -> Iterator[topology.Topology]:
    """A process group of this process alone, gone on leaving; one that exists is used if it is of one rank.

    Raises:
        LaunchError: this process is one of several ranks already.
    """
    found = dist.is_initialized()
    if not found:
        topology.start_process_group(0, 1, store=dist.HashStore())
    elif dist.get_world_size() > 1:
        raise LaunchError("needs a process of its own", found=f"{dist.get_world_size()} ranks", expected="one")
    try:
        yield topology.initialize(ParallelConfig(), seed=0)
    finally:
        mpu.destroy_model_parallel()
        if not found:
            dist.destroy_process_group()


@torch.no_grad()
def outputs(path: str, tokens: np.ndarray) -> torch.Tensor:
    """Logits of a policy or values of a critic, by Megatron, float32 on the CPU.

    Args:
        path: HF checkpoint directory; the model is built in float32, without gradients or optimizer.
        tokens: int [n], one sequence.

    Returns:
        [n, V] or [n, 1].
    """
    with one_rank() as place:
        model = _bare_model(path, place)
        tokens = np.asarray(tokens, np.int32)
        sampled = np.arange(len(tokens)) > 0
        stream = actor_stream(tokens, np.array([0, len(tokens)]), sampled)
        plan = plan_micro_batches(
            stream.lengths, token_budget=len(tokens), data_ranks=1, cp=1, tp=1, cost=CostModel(), count_multiple=1
        )
        layers = {layer: model.hf.moe_layers.index(layer) for layer in model.registry.layers}
        routes = RouteSpec(None, layers, model.hf.num_experts, model.hf.topk)
        (batch,) = prepare_micro_batches(stream, plan, place, routes)
        with model.registry.step(training=False), model.registry.forward(0, batch.router):
            hidden = model.bare[0](
                input_ids=batch.tokens,
                position_ids=batch.positions,
                attention_mask=None,
                packed_seq_params=batch.attention,
            )[0]
        if model.role == "policy":
            hidden = hidden @ model.output_weight()[: model.hf.vocab_size].T
        return hidden[: len(tokens)].float().cpu()


def _bare_model(path: str, place: topology.Topology) -> Model:
    """The model without the data-parallel wrapper, whose gradient buffers would double its memory."""
    hf = read_hf_config(path)
    config = transformer_config(hf, ParallelConfig(), PerformanceConfig(), torch.float32)
    role: Role = "value" if hf.head == "value" else "policy"
    bare = [chunk.to(platform.device()) for chunk in build_chunks(hf, config, place, role)]
    model = Model(role, hf, config, place, bare, bare, route_registry(hf, bare))
    import_hf(model, path, hf)
    return model
