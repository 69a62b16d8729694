"""Which rank this process is, read from whoever started it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.backend import topology
from megatron_rl.config import RunConfig
from megatron_rl.errors import LaunchError


@dataclass(frozen=True)
class RankEnvironment:
    """Place of this process among all, and where rank 0 listens."""

    rank: int
    local_rank: int
    world: int
    address: str
    port: int
    source: str
    """Who said so: `torchrun`, `slurm` or `single`."""


def read_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """torchrun's variables first, then srun's; neither: one process of its own.

    Raises:
        LaunchError: some variables of a launcher are there and others are not; lists what was looked for.
    """
    found = os.environ if variables is None else variables
    if "RANK" in found or "WORLD_SIZE" in found:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, local, world, address, port = _all_of(found, names, "torchrun")
        return RankEnvironment(int(rank), int(local), int(world), address, int(port), "torchrun")
    if int(found.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in found:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT")
        rank, local, world, address, port = _all_of(found, names, "srun")
        return RankEnvironment(int(rank), int(local), int(world), address, int(port), "slurm")
    return RankEnvironment(0, 0, 1, "127.0.0.1", _free_port(), "single")


def _all_of(found: Mapping[str, str], names: tuple[str, ...], launcher: str) -> list[str]:
    missing = [name for name in names if name not in found]
    if missing:
        raise LaunchError(
            f"{launcher} started this process but did not say where it belongs",
            found=f"no {', '.join(missing)}",
            expected=", ".join(names),
            setting="export MASTER_ADDR and MASTER_PORT in the batch script"
            if launcher == "srun"
            else "start with torchrun",
        )
    return [found[name] for name in names]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ranks(config: RunConfig, *, threads: int = 1) -> Iterator[topology.Topology]:
    """Join all ranks, make the layout's groups, and leave in order.

    Args:
        config: its layout and seed.
        threads: CPU threads of this rank.
    """
    place = read_environment()
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    torch.set_num_threads(threads)
    topology.start_process_group(place.rank, place.world, init_method=f"tcp://{place.address}:{place.port}")
    try:
        yield topology.initialize(config.parallel, seed=config.seed)
        dist.barrier()
    finally:
        dist.destroy_process_group()
