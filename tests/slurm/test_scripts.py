"""What the batch scripts make of exit statuses, signals, cancellations, chains, containers and duplicates.

Ranks are stubs here (`stub.sh`), so each case takes seconds; `test_runs.py` trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture
def without_cluster(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts train.sbatch as SLURM would; SLURM's commands are stubs, and the step says "a step runs"."""
    stubs = {
        "scontrol": 'case "$*" in *"show job"*) echo JobState=RUNNING ;; *hostnames*) echo node ;; esac',
        "srun": "trap 'exit 85' USR1; echo a step runs; while true; do sleep 0.1; done",
    }
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    started = []

    def start(**variables: str) -> subprocess.Popen:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MRL_ROOT": str(ROOT), "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node", "SLURM_NTASKS": "1", "SLURM_SUBMIT_DIR": str(tmp_path),
            "MRL_LOGS": str(tmp_path), "MRL_OUTPUT": str(tmp_path), "MRL_REQUEUE": "0", **variables,
        }  # fmt: skip
        command = ["bash", str(ROOT / "slurm" / "train.sbatch"), "run.yaml"]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen, text: str) -> None:
    while text not in (line := process.stdout.readline()):
        assert line, f"ended without saying: {text}"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_asked_to_stop_while_it_waits_for_a_lock_it_requeues(without_cluster, tmp_path: Path, number: int) -> None:
    """No SLURM needed. Untrapped, the signal would end the job as FAILED and for good."""
    (tmp_path / "run.lock").write_text('{"job": "999"}')
    job = without_cluster()
    said(job, "job 7 restart 0")
    job.send_signal(number)
    said(job, "not requeued: MRL_REQUEUE=0")
    assert job.wait(timeout=30) == 85


def test_the_time_of_a_lock_says_nothing(without_cluster, tmp_path: Path) -> None:
    """Two hours behind this node's clock; without a lock the step runs and gets the signal."""
    lock, old = tmp_path / "run.lock", time.time() - 7200
    lock.write_text('{"job": "999"}')
    os.utime(lock, (old, old))
    job = without_cluster(MRL_LOCK_WAIT="3")
    said(job, "job 7 restart 0")
    assert job.wait(timeout=30) == 2
    (tmp_path / "run.lock").unlink()
    job = without_cluster()
    said(job, "a step runs")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 85


def test_a_helper_that_ends_before_the_step_begins_ends_the_step(tmp_path: Path) -> None:
    """Its signal comes before `supervise` waits for it."""
    script = f"""
set -euo pipefail
source {ROOT}/slurm/lib.sh
conclude() {{ echo "concluded $1 ${{helper_ended:-}}"; exit "$1"; }}
catch_signals
kill -USR2 $$
supervise bash -c 'trap "exit 85" USR1; while true; do sleep 0.1; done'
"""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=os.environ | {"MRL_HELPER_GRACE": "1"}
    )
    assert "concluded 85 1" in done.stdout and done.returncode == 85


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
