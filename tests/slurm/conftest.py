"""One cluster for the session, one tiny model, and a run that nothing disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import harness

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Cluster]:
    """A real SLURM of four nodes."""
    path = "/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name) and not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (bash tests/slurm/install.sh)")
    # The daemons' sockets lie below it, and their paths are limited to 107 bytes.
    directory = tmp_path_factory.getbasetemp() / "c"
    found = harness.Cluster(directory, SLURM_LOCAL_NODE_TIMEOUT="10", SLURM_LOCAL_REQUEUE_DELAY="5")
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture
def whole(cluster: harness.Cluster) -> Iterator[harness.Cluster]:
    """The cluster, its nodes mended afterwards and its queue emptied."""
    yield cluster
    cluster.run("scancel", "--user=root", "--full")
    cluster.start()


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tiny run."""
    return harness.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(cluster: harness.Cluster, run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run by srun on four nodes, without a fault."""
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    (job,) = harness.submit(cluster, run_file, output)
    assert "COMPLETED Restarts=0" in cluster.wait(job), harness.log_text(output)
    harness.assert_each_iteration_trained_once(output)
    return output
