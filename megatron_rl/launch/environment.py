"""Rank and rendezvous of this process, read from its launcher, and joining the process group."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.backend import platform, topology
from megatron_rl.config import RunConfig
from megatron_rl.errors import LaunchError

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *_ADDRESS)
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", *_ADDRESS)
_MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", *_ADDRESS)
_MPI_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
"""Any of them: MPI started this process. srun sets PMI's for every program, so srun with an address is tried first."""


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process, and the address rank 0 listens at."""

    rank: int
    local_rank: int
    """Rank among those of this node: the GPU it takes."""
    world: int
    address: str
    port: int
    source: str
    """The launcher: `torchrun`, `mpirun`, `slurm`, `mpi` (through mpi4py) or `single`."""
    store: dist.Store | None = None
    """The rendezvous store, if open already; None: rank 0 opens it at `address` and `port`."""


def read_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read the launcher's variables: torchrun, then mpirun, srun, MPI itself; without a launcher a single process.

    mpirun comes before srun: its ranks see the variables of the srun that started its daemons, with a wrong rank. MPI
    is asked, through mpi4py, only where no address is given: rank 0 opens a port and broadcasts it.

    Args:
        variables: instead of this process's environment.

    Raises:
        LaunchError: a launcher's variables are incomplete; lists the expected and the missing ones.
    """
    found = os.environ if variables is None else variables
    if "RANK" in found or "WORLD_SIZE" in found:
        return _from(found, _TORCHRUN, "torchrun", "start with torchrun, or unset RANK and WORLD_SIZE")
    addressed = all(name in found for name in _ADDRESS)
    if "OMPI_COMM_WORLD_SIZE" in found and addressed:
        return _from(found, _MPIRUN, "mpirun", "start with mpirun")
    several = int(found.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in found
    by_mpi = any(name in found for name in _MPI_MARKS)
    if several and (addressed or not by_mpi):
        return _from(found, _SRUN, "slurm", "MASTER_ADDR and MASTER_PORT in the batch script, or srun --mpi=pmix")
    if by_mpi:
        return _from_mpi()
    return RankEnvironment(0, 0, 1, "127.0.0.1", _free_port(), "single")


def _from(found: Mapping[str, str], names: tuple[str, ...], launcher: str, setting: str) -> RankEnvironment:
    missing = [name for name in names if name not in found]
    if missing:
        raise LaunchError(
            f"{launcher} started this process but did not say where it belongs",
            found=f"no {', '.join(missing)}",
            expected=", ".join(names),
            setting=setting,
        )
    rank, local, world, address, port = (found[name] for name in names)
    return RankEnvironment(int(rank), int(local), int(world), address, int(port), launcher)


def _from_mpi() -> RankEnvironment:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "MPI started this process, but it cannot be asked for ranks",
            found=str(error),
            expected=f"mpi4py and an MPI library, or all of {', '.join(_MPIRUN)}",
            setting="pip install mpi4py, or export MASTER_ADDR and MASTER_PORT",
        ) from error
    world = MPI.COMM_WORLD
    store = None
    if world.Get_rank() == 0:
        # Port 0: the kernel chooses, and it listens before anybody knows the port, so no other job can take it.
        store = dist.TCPStore("0.0.0.0", 0, world.Get_size(), is_master=True, wait_for_workers=False)
    address, port = world.bcast((socket.gethostname(), store.port) if store else None, root=0)
    local = world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
    if store is None:
        store = dist.TCPStore(address, port, world.Get_size(), is_master=False)
    return RankEnvironment(world.Get_rank(), local, world.Get_size(), address, port, "mpi", store)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_gpu(place: RankEnvironment, visible: int) -> None:
    """Refuse to start a rank that has no GPU of its own.

    Args:
        place: this rank.
        visible: GPUs this process sees.

    Raises:
        LaunchError: fewer GPUs than ranks of this node.
    """
    if place.local_rank >= visible:
        raise LaunchError(
            "a rank has no GPU of its own",
            found=f"local rank {place.local_rank} (counted from 0), {visible} visible",
            expected="as many GPUs as ranks of a node, all of them visible to each",
            setting="--gpus-per-node and --ntasks-per-node alike, without --gpus-per-task or --gpu-bind",
        )


@contextlib.contextmanager
def ranks(config: RunConfig, *, threads: int = 1) -> Iterator[topology.Topology]:
    """Context: the process group of all ranks with the layout's groups; destroyed on leaving, after a barrier.

    Args:
        config: its layout and seed.
        threads: CPU threads of this rank.
    """
    place = read_environment()
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    if platform.on_gpu():
        check_gpu(place, torch.cuda.device_count())
    torch.set_num_threads(threads)
    method = None if place.store else f"tcp://{place.address}:{place.port}"
    topology.start_process_group(place.rank, place.world, place.store, method)
    try:
        yield topology.initialize(config.parallel, seed=config.seed)
        dist.barrier()
    finally:
        dist.destroy_process_group()
