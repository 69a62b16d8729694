"""What the batch scripts make of exit statuses, signals, cancellations, chains, containers and duplicates.

Ranks are stubs here (`stub.sh`), so each case takes seconds; `test_runs.py` trains.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.harness import ROOT, Cluster, log_text, submit, until

STUB = str(ROOT / "tests" / "slurm" / "stub.sh")


def stubbed(cluster: Cluster, run_file: Path, output: Path, plan: str, **options) -> list[str]:
    variables = {"MRL_PYTHON": STUB, "STUB": plan, **options.pop("variables", {})}
    return submit(cluster, run_file, output, layout=(), nodes=options.pop("nodes", 2), variables=variables, **options)


def signal_when_running(cluster: Cluster, job: str, output: Path, plan: str = "wait") -> None:
    until(lambda: f"stub: {plan} rank 1" in log_text(output), what="both ranks run")
    cluster.run("scancel", "--batch", "--signal=USR1", job)


def test_stop_signal_reaches_ranks_and_requeues(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "wait 0")
    signal_when_running(whole, job, output)
    assert "COMPLETED Restarts=1 ExitCode=0:0" in whole.wait(job)
    names = sorted(file.name for file in (output / "slurm").glob("*.log"))
    assert names == [f"job-{job}-restart-0-train.log", f"job-{job}-restart-1-train.log", f"job-{job}.log"]
    # The main log holds both starts: a requeue appends.
    main = (output / "slurm" / f"job-{job}.log").read_text()
    assert "restart 0" in main and "restart 1" in main and "after it was asked to stop" in main
    assert not (output / "slurm" / f"job-{job}.crashes").exists()


def test_a_dead_rank_ends_all_and_crashes_are_bounded(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "crash crash crash", variables={"MRL_MAX_CRASHES": "2"})
    until(lambda: "stub: crash rank 1" in log_text(output), what="the rank that dies")
    start = time.monotonic()
    until(lambda: "crash 1 of at most 2" in log_text(output), what="the other ranks ended", seconds=60)
    assert time.monotonic() - start < 60
    assert "FAILED Restarts=1" in whole.wait(job)


def test_progress_starts_the_count_of_crashes_again(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "3 3 0", variables={"MRL_MAX_CRASHES": "2"})
    until(lambda: "crash 1 of" in log_text(output), what="the first crash")
    (output / "checkpoints" / "iteration_00000001").mkdir(parents=True)
    assert "COMPLETED Restarts=2" in whole.wait(job)


def test_cancelled_stays_cancelled(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "wait wait")
    until(lambda: "stub: wait rank 1" in log_text(output), what="both ranks run")
    whole.run("scancel", job)
    assert "CANCELLED Restarts=0" in whole.wait(job)
    time.sleep(3)
    assert whole.state(job) == "CANCELLED"


def test_a_chain_goes_on_after_a_stop_and_ends_with_the_run(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    first, second, third = stubbed(whole, run_file, output, "wait", chain=3)
    signal_when_running(whole, first, output)
    assert "FAILED Restarts=0 ExitCode=85:0" in whole.wait(first)
    second_log = output / "slurm" / f"job-{second}-restart-0-train.log"
    until(lambda: second_log.exists() and "stub: wait" in second_log.read_text(), what="the second link runs")
    assert whole.state(third) == "PENDING"
    whole.run("scancel", second)
    assert "CANCELLED" in whole.wait(second)


def test_a_completed_link_removes_the_rest_of_the_chain(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    first, second = stubbed(whole, run_file, tmp_path / "run", "0", chain=2)
    assert "COMPLETED" in whole.wait(first)
    assert "CANCELLED" in whole.wait(second, 60)


def test_a_second_job_on_a_run_directory_is_refused(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    lock = output / "run.lock"
    lock.write_text(
        json.dumps({"token": "a", "host": "elsewhere", "process": 1, "started": "1", "job": "999", "restart": 0})
    )
    (job,) = stubbed(whole, run_file, output, "0", variables={"MRL_LOCK_WAIT": "4"})
    assert "FAILED Restarts=0 ExitCode=2:0" in whole.wait(job)
    assert "job 999 trains in" in log_text(output) and "Change: output=" in log_text(output)


def test_a_container_without_pyxis_is_refused_by_name(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "0", container="image.sqsh")
    assert "FAILED" in whole.wait(job)
    assert "MRL_CONTAINER is set, but srun here has no --container-image" in log_text(output)


@pytest.mark.full
def test_a_container_is_given_to_every_task(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "p"
    folder.mkdir()
    plugin, source = folder / "pyxis.so", ROOT / "tests" / "slurm" / "pyxis_stub.c"
    if not shutil.which("gcc") or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("gcc or libslurm-dev is not installed")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", plugin, source], check=True)
    cluster = Cluster(folder / "c", SLURM_LOCAL_SPANK=str(plugin))
    try:
        cluster.start(2)
        output = folder / "run"
        (job,) = stubbed(cluster, run_file, output, "0", container="image.sqsh")
        assert "COMPLETED" in cluster.wait(job)
        assert log_text(output).count("image=image.sqsh") == 2
    finally:
        cluster.stop()


def test_an_array_trains_one_seed_a_member(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = stubbed(whole, run_file, output, "85 0", seeds="3-4", nodes=1)
    # A member that is requeued takes no other along.
    assert whole.wait(job).count("COMPLETED Restarts=1") == 2
    for seed in (3, 4):
        assert f"seed={seed} output={output}/seed-{seed}" in log_text(output)
