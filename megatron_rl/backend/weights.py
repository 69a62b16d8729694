"""HF checkpoints into live models, each rank reading its own byte ranges, and back, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_rl.backend.model import Model
from megatron_rl.backend.parameters import LocalParameter, param_ref, stored_parameters
from megatron_rl.hf.ahead import ahead
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.exporter import ExpertStacks, join_shards
from megatron_rl.hf.importer import load_shard, needs_initialisation
from megatron_rl.hf.quantised import open_checkpoint
from megatron_rl.hf.table import KEPT_DTYPE
from megatron_rl.hf.value_head import check_head_bias


@torch.no_grad()
def import_hf(model: Model, path: str, source: HFModelConfig, *, head_seed: int | None = None) -> None:
    """Fill a model from an HF checkpoint without a collective.

    Args:
        model: its parameters are overwritten.
        path: checkpoint directory.
        source: `read_hf_config(path)`.
        head_seed: seed of a fresh value head; None leaves it zero (the first values are then 0).

    Raises:
        CheckpointError: a tensor is missing, misshapen or non-finite.
    """
    reader = open_checkpoint(path)
    check_head_bias(reader, source)
    stored = []
    for local in stored_parameters(model):
        if needs_initialisation(source, local.canonical):
            _fresh_head(local.tensor, head_seed)
        else:
            stored.append(local)
    shards = ahead(load_shard(reader, source, param_ref(model, local)) for local in stored)
    for local, shard in zip(stored, shards, strict=True):
        local.tensor.copy_(shard)


def _fresh_head(weight: torch.Tensor, seed: int | None) -> None:
    if seed is None:
        weight.zero_()
        return
    generator = torch.Generator().manual_seed(seed)
    weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)


Key = tuple[str, int, int]
"""(canonical name, layer or -1, expert position on its expert rank or -1)."""


@torch.no_grad()
def export_hf(model: Model, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, whole tensor), one at a time, on every rank. Collective: all ranks must iterate to the end.

    Args:
        model: the live model.
        dtype: cast to this on the way, except `KEPT_DTYPE`; None: as trained.
    """
    mine = {_key(model, local): local for local in stored_parameters(model) if not local.shared}
    owners, stacks = _owners(model, mine), ExpertStacks(model.hf)
    for key, (stage, shape, parameter_dtype, split) in sorted(owners.items()):
        tensor = _from_stage(model, mine.get(key), stage, shape, parameter_dtype)
        canonical, layer, position = key
        is_expert = position >= 0
        group = mpu.get_expert_tensor_parallel_group() if is_expert else model.topology.tp_group
        full = join_shards(canonical, _all_gather(tensor, group) if split != "replicated" else [tensor], model.hf)
        per_rank = model.hf.num_experts // model.topology.config.expert if is_expert else 0
        gathered = _all_gather(full, mpu.get_expert_model_parallel_group()) if is_expert else [full]
        for rank, part in enumerate(gathered):
            expert = rank * per_rank + position if is_expert else None
            for name, piece in stacks.split(canonical, part, layer=layer if layer >= 0 else None, expert=expert):
                yield name, piece if dtype is None or canonical in KEPT_DTYPE else piece.to(dtype)


def _key(model: Model, local: LocalParameter) -> Key:
    per_rank = model.hf.num_experts // model.topology.config.expert if local.expert is not None else 1
    position = -1 if local.expert is None else local.expert % per_rank
    return (local.canonical, -1 if local.layer is None else local.layer, position)


def _owners(model: Model, mine: dict[Key, LocalParameter]) -> dict:
    """Key → (pipeline stage that holds it, local shape, dtype, split)."""
    described = {key: (tuple(local.tensor.shape), local.tensor.dtype, local.split) for key, local in mine.items()}
    found: list[dict] = [{}] * model.topology.pp_group.size()
    dist.all_gather_object(found, described, group=model.topology.pp_group)
    return {key: (stage, *entry) for stage, entries in enumerate(found) for key, entry in entries.items()}


def _from_stage(model: Model, local: LocalParameter | None, stage: int, shape, dtype) -> torch.Tensor:
    """The tensor of pipeline stage `stage`, on every stage. Collective over the stages; `local`: None elsewhere."""
    group = model.topology.pp_group
    if local is not None:
        tensor = local.tensor.detach().contiguous()
    else:
        tensor = torch.empty(shape, dtype=dtype, device=next(model.bare[0].parameters()).device)
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [tensor]
    out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(out, tensor.contiguous(), group=group)
    return out
