"""Live parameters by canonical name, global layer, global expert and split, and their float32 main copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_rl.backend.model import Model
from megatron_rl.hf.importer import ParamRef
from megatron_rl.hf.inventory import rule_for
from megatron_rl.hf.names import parse_parameter_name
from megatron_rl.hf.table import Split


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank (its tensor-parallel shard), or a buffer that checkpoints hold."""

    canonical: str
    layer: int | None
    """Global, 0-based."""
    expert: int | None
    """Global, 0-based."""
    split: Split
    tensor: torch.Tensor

    @property
    def shared(self) -> bool:
        """The last stage's copy of a tied embedding: the first stage's is the one that counts."""
        return bool(getattr(self.tensor, "shared", False))


def local_parameters(model: Model) -> Iterator[LocalParameter]:
    """Every parameter of this rank's chunks, in order.

    Raises:
        CheckpointError: a parameter the family's table does not know.
    """
    for chunk in model.bare:
        for name, parameter in chunk.named_parameters():
            yield _local_parameter(model, chunk, name, parameter)


def stored_parameters(model: Model) -> Iterator[LocalParameter]:
    """`local_parameters` and the buffers that checkpoints hold: the routers' expert biases, which no optimizer sees."""
    yield from local_parameters(model)
    for chunk in model.bare:
        for name, buffer in chunk.named_buffers():
            if name.endswith(".router.expert_bias"):
                yield _local_parameter(model, chunk, name, buffer)


def _local_parameter(model: Model, chunk: GPTModel, name: str, tensor: torch.Tensor) -> LocalParameter:
    hf = model.hf
    parsed = parse_parameter_name(name, value_head=model.role == "value")
    layer = None if parsed.layer is None else chunk.decoder.layers[parsed.layer].layer_number - 1
    expert = parsed.expert
    if expert is not None:
        expert += hf.num_experts // model.topology.config.expert * model.topology.ep_rank
    return LocalParameter(parsed.canonical, layer, expert, rule_for(hf, parsed.canonical).split, tensor)


def param_ref(model: Model, local: LocalParameter) -> ParamRef:
    """What the HF importer needs to know to read this rank's shard."""
    topology, layout = model.topology, model.topology.config
    ranks = (topology.tp_rank, layout.tensor) if local.expert is None else (topology.etp_rank, layout.expert_tensor)
    return ParamRef(local.canonical, local.layer, local.expert, *ranks, tuple(local.tensor.shape))


def replicas(model: Model, local: LocalParameter) -> int:
    """How many ranks of the world hold the same values of a whole local parameter."""
    layout, world = model.topology.config, model.topology.world
    if local.expert is None:
        return world // (layout.pipeline * (layout.tensor if local.split != "replicated" else 1))
    return world // (layout.pipeline * layout.expert * (layout.expert_tensor if local.split != "replicated" else 1))


def optimizer_shards(model: Model, local: LocalParameter) -> int:
    """Over how many ranks the distributed optimizer shards this parameter's main copy."""
    layout, world = model.topology.config, model.topology.world
    held = layout.tensor if local.expert is None else layout.expert * layout.expert_tensor
    return world // (layout.pipeline * held)


def main_copies(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """(what the optimizer updates, the model parameter it belongs to) of one optimizer on this rank.

    Under the distributed optimizer the first is this rank's flat piece; in float32 it aliases the parameter's memory.
    """
    pairs: Sequence[tuple[list, list]]
    if isinstance(part, DistributedOptimizer):
        pairs = (
            (part.shard_fp32_from_float16_groups, part.model_float16_groups),
            (part.shard_fp32_groups, part.model_fp32_groups),
        )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = (
            (part.fp32_from_float16_groups, part.float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        )
    else:
        groups = [group["params"] for group in part.param_groups]
        pairs = ((groups, groups),)
    for mains, models in pairs:
        for main_group, model_group in zip(mains, models, strict=True):
            yield from zip(main_group, model_group, strict=True)
