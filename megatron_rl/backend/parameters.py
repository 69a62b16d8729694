"""What every live parameter is: its canonical name, global layer and expert, how it is cut, and its float32 main
copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_rl.backend.model import Model
from megatron_rl.hf.importer import ParamRef
from megatron_rl.hf.inventory import rule_for
from megatron_rl.hf.names import parse_parameter_name
from megatron_rl.hf.table import Split


@dataclass(frozen=True)
class Place:
    """One parameter of this rank."""

    canonical: str
    layer: int | None
    """Global, 0-based."""
    expert: int | None
    """Global, 0-based."""
    split: Split
    parameter: torch.Tensor
    """A parameter, or a buffer that checkpoints hold."""

    @property
    def shared(self) -> bool:
        """The last stage's copy of a tied embedding: the first stage's is the one that counts."""
        return bool(getattr(self.parameter, "shared", False))


def places(model: Model) -> Iterator[Place]:
    """Every parameter of this rank's chunks, in order.

    Raises:
        CheckpointError: a parameter the family's table does not know.
    """
    for chunk in model.bare:
        for name, parameter in chunk.named_parameters():
            yield _place(model, chunk, name, parameter)


def stored_places(model: Model) -> Iterator[Place]:
    """`places`, and the buffers that checkpoints hold: the routers' expert biases, which no optimizer sees."""
    yield from places(model)
    for chunk in model.bare:
        for name, buffer in chunk.named_buffers():
            if name.endswith(".router.expert_bias"):
                yield _place(model, chunk, name, buffer)


def _place(model: Model, chunk: torch.nn.Module, name: str, tensor: torch.Tensor) -> Place:
    hf = model.hf
    parsed = parse_parameter_name(name, value_head=model.role == "value")
    layer = None if parsed.layer is None else chunk.decoder.layers[parsed.layer].layer_number - 1
    expert = parsed.expert
    if expert is not None:
        expert += hf.num_experts // model.topology.config.expert * model.topology.ep_rank
    return Place(parsed.canonical, layer, expert, rule_for(hf, parsed.canonical).split, tensor)


def reference(model: Model, place: Place) -> ParamRef:
    """A place as the HF importer asks for it."""
    topology, layout = model.topology, model.topology.config
    ranks = (topology.tp_rank, layout.tensor) if place.expert is None else (topology.etp_rank, layout.expert_tensor)
    return ParamRef(place.canonical, place.layer, place.expert, *ranks, tuple(place.parameter.shape))


def copies(model: Model, place: Place) -> int:
    """How many ranks of the world hold the same values of a whole local parameter."""
    layout, world = model.topology.config, model.topology.world
    if place.expert is None:
        return world // (layout.pipeline * (layout.tensor if place.split != "replicated" else 1))
    return world // (layout.pipeline * layout.expert * (layout.expert_tensor if place.split != "replicated" else 1))


def data_ranks(model: Model, place: Place) -> int:
    """Over how many ranks the distributed optimizer cuts this parameter's main copy."""
    layout, world = model.topology.config, model.topology.world
    held = layout.tensor if place.expert is None else layout.expert * layout.expert_tensor
    return world // (layout.pipeline * held)


def main_copies(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """(what the optimizer updates, the model parameter it belongs to) of one optimizer on this rank.

    Under the distributed optimizer the first is this rank's flat piece; in float32 it aliases the parameter's memory.
    """
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
