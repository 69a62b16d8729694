"""Who this process is, from each launcher's variables."""

from __future__ import annotations

import sys

import pytest

from megatron_rl.errors import LaunchError
from megatron_rl.launch.environment import RankEnvironment, check_gpu, read_environment


def test_torchrun() -> None:
    found = read_environment(
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "9", "SLURM_NTASKS": "8"}
    )
    assert (found.rank, found.local_rank, found.world, found.address, found.port) == (3, 1, 4, "a", 9)
    assert found.source == "torchrun"


def test_srun() -> None:
    found = read_environment(
        {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "MASTER_ADDR": "n", "MASTER_PORT": "7"}
    )
    assert (found.rank, found.world, found.source) == (5, 8, "slurm")


def test_mpirun_wins_over_the_srun_that_started_its_daemons() -> None:
    found = read_environment(
        {
            "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
            "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "n", "MASTER_PORT": "7",
        }
    )  # fmt: skip
    assert (found.rank, found.local_rank, found.world, found.source) == (3, 1, 4, "mpirun")


def test_an_address_of_the_batch_script_makes_mpi_unnecessary() -> None:
    found = read_environment(
        {
            "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "PMIX_RANK": "5", "MASTER_ADDR": "n",
            "MASTER_PORT": "7",
        }
    )  # fmt: skip
    assert (found.rank, found.source) == (5, "slurm")


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}]
)
def test_mpi_that_cannot_be_asked_is_an_error(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match="mpi4py.*MASTER_ADDR"):
        read_environment(variables)


def test_a_rank_without_a_gpu_of_its_own_is_refused() -> None:
    place = RankEnvironment(9, 1, 16, "n", 7, "slurm")
    check_gpu(place, visible=2)
    with pytest.raises(LaunchError, match="--gpus-per-task"):
        check_gpu(place, visible=1)


def test_alone() -> None:
    found = read_environment({})
    assert (found.rank, found.world, found.source) == (0, 1, "single") and found.port > 0


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}])
def test_half_a_launcher_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        read_environment(variables)
