"""The layout of a model over the ranks: its checks, Megatron's process groups, and this rank's coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from megatron_rl.backend import platform
from megatron_rl.config import ParallelConfig
from megatron_rl.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """This rank's coordinates and groups. Groups are torch process groups; sizes are ranks."""

    config: ParallelConfig
    rank: int
    world: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int
    """Rank among the data replicas; context-parallel peers share it."""
    dp: int
    """Data replicas: world / (TP · PP · CP)."""
    ep_rank: int
    etp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    """All ranks that hold the same weights: the group a loss is summed over."""

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.pp_rank == self.config.pipeline - 1


def initialize(config: ParallelConfig, *, seed: int, fake: bool = False) -> Topology:
    """Make Megatron's groups for this layout on the default process group.

    Args:
        config: the layout.
        seed: seed of Megatron's RNG tracker.
        fake: the process group is fake (planning): no gloo groups, no RNG on a device.

    Raises:
        ConfigError: the world does not divide; names the two numbers and the nearest layouts that do.
    """
    check_layout(config, dist.get_world_size())
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        create_gloo_process_groups=not fake,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return _current(config)


def _current(config: ParallelConfig) -> Topology:
    return Topology(
        config=config,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp=mpu.get_data_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )


def check_layout(config: ParallelConfig, world: int) -> None:
    """Refuse a layout that does not divide the world. See `initialize`."""
    if world % config.model_ranks:
        raise ConfigError(
            "the world does not divide into replicas",
            found=f"{world} ranks for tensor·pipeline·context = {config.model_ranks}",
            expected=f"a multiple of it; nearest worlds: {_nearest(world, config.model_ranks)}",
            setting="parallel.tensor, parallel.pipeline, parallel.context, or the number of ranks",
        )
    stage, expert = world // config.pipeline, config.expert * config.expert_tensor
    if stage % expert:
        fits = [n for n in range(1, stage + 1) if stage % (n * config.expert_tensor) == 0]
        raise ConfigError(
            "the ranks of a stage do not divide into expert groups",
            found=f"{stage} ranks for expert·expert_tensor = {expert}",
            expected=f"parallel.expert among {fits}",
            setting="parallel.expert, parallel.expert_tensor",
        )


def check_model_fits(config: ParallelConfig, *, heads: int, kv_heads: int, experts: int, layers: int, ffn: int) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        ConfigError: names the two numbers and the nearest valid values.
    """
    checks = [
        ("parallel.tensor", config.tensor, heads, "attention heads"),
        ("parallel.tensor", config.tensor, kv_heads, "key/value groups"),
        ("parallel.expert", config.expert, experts, "experts"),
        ("parallel.expert_tensor", config.expert_tensor, ffn, "expert intermediate width"),
    ]
    uneven = config.first_stage_layers is not None or config.last_stage_layers is not None
    if not uneven and config.pipeline_layout is None:
        stages = config.pipeline * config.virtual_pipeline
        checks.append(("parallel.pipeline · virtual_pipeline", stages, layers, "layers"))
    for name, size, total, what in checks:
        if total and total % size:
            valid = [n for n in range(1, total + 1) if total % n == 0]
            near = sorted(valid, key=lambda n: (abs(n - size), n))[:3]
            raise ConfigError(
                f"{what} do not divide over {name}",
                found=f"{total} over {size}",
                expected=f"a divisor; nearest: {sorted(near)}",
                setting=name
                if "·" not in name
                else f"{name}, or first_stage_layers / pipeline_layout for uneven stages",
            )


def _nearest(world: int, unit: int) -> list[int]:
    below = world // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def start_process_group(rank: int, world: int, store: dist.Store | None = None, init_method: str | None = None) -> None:
    """Join the default process group with the collective backend of this machine."""
    platform.install()
    if platform.on_gpu():
        import os

        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    kind = platform.collective_backend()
    dist.init_process_group(kind, rank=rank, world_size=world, store=store, init_method=init_method)
