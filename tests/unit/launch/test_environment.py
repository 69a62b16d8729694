"""Who this process is, from each launcher's variables."""

from __future__ import annotations

import pytest

from megatron_rl.errors import LaunchError
from megatron_rl.launch.environment import read_environment


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


def test_alone() -> None:
    found = read_environment({})
    assert (found.rank, found.world, found.source) == (0, 1, "single") and found.port > 0


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}])
def test_half_a_launcher_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        read_environment(variables)
