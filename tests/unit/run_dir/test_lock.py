"""One writer a run directory; a crash leaves nothing to clean up by hand."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl.errors import LaunchError
from megatron_rl.run_dir import lock
from megatron_rl.run_dir.lock import NAME, RunLock, read_owner, run_lock

HOLD = """
import sys, time
from pathlib import Path
from megatron_rl.run_dir.lock import RunLock
RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def holder(directory: Path, **environment: str) -> subprocess.Popen:
    """Another living process with the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, env=os.environ | environment
    )
    assert process.stdout.readline() == b"held\n"
    return process


def pretend(directory: Path, **changes) -> None:
    """The lock file of a process elsewhere."""
    owner = replace(lock.Owner("t", "another-host", 1, "2", "", 0), **changes)
    (directory / NAME).write_text(json.dumps(asdict(owner)))


def test_a_second_process_is_refused_until_the_first_has_crashed(tmp_path: Path) -> None:
    first = holder(tmp_path)
    with pytest.raises(LaunchError, match="another process trains") as caught:
        RunLock(tmp_path)
    assert str(first.pid) in str(caught.value) and "output" in caught.value.setting
    first.kill()
    first.wait()
    assert (tmp_path / NAME).exists()
    RunLock(tmp_path).release()
    assert not (tmp_path / NAME).exists()


def test_a_process_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    pretend(tmp_path, host=socket.gethostname(), process=os.getppid(), started=lock._started(os.getppid()))
    with pytest.raises(LaunchError, match=str(os.getppid())):
        RunLock(tmp_path)
    pretend(tmp_path, host=socket.gethostname(), process=os.getppid(), started="1")
    mine = RunLock(tmp_path)
    assert mine.held and read_owner(tmp_path / NAME).process == os.getpid()
    mine.release()


def test_a_silent_host_is_dead_after_a_while(tmp_path: Path) -> None:
    pretend(tmp_path)
    with pytest.raises(LaunchError, match="another-host"):
        RunLock(tmp_path)
    old = time.time() - lock.STALE_SECONDS - 1
    os.utime(tmp_path / NAME, (old, old))
    RunLock(tmp_path).release()


def test_a_requeued_job_takes_its_own_lock_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    pretend(tmp_path, job="41", restart=0)
    RunLock(tmp_path).release()
    pretend(tmp_path, job="40", restart=0)
    with pytest.raises(LaunchError, match="SLURM job 40"):
        RunLock(tmp_path)
    pretend(tmp_path, job="41", restart=1)
    with pytest.raises(LaunchError):
        RunLock(tmp_path)


def contend(directory: Path, results, all_have_tried) -> None:
    try:
        RunLock(directory)
        results.put(1)
    except LaunchError:
        results.put(0)
    # A winner that ended before the last one looked would leave a dead lock behind.
    all_have_tried.wait()


def test_of_many_that_find_a_dead_lock_one_wins(tmp_path: Path) -> None:
    pretend(tmp_path)
    old = time.time() - lock.STALE_SECONDS - 1
    os.utime(tmp_path / NAME, (old, old))
    context = multiprocessing.get_context("fork")
    results, all_have_tried = context.Queue(), context.Event()
    processes = [context.Process(target=contend, args=(tmp_path, results, all_have_tried)) for _ in range(6)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=30) for _ in processes) == 1
    all_have_tried.set()
    for process in processes:
        process.join()


def test_a_lock_lost_ends_its_process(tmp_path: Path) -> None:
    quick = HOLD.replace(
        "RunLock(Path", "from megatron_rl.run_dir import lock; lock.TOUCH_SECONDS = 0.05; RunLock(Path"
    )
    process = subprocess.Popen([sys.executable, "-c", quick, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    pretend(tmp_path)
    assert process.wait(timeout=30) == 1
    assert read_owner(tmp_path / NAME).host == "another-host"


def test_an_illegible_lock_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{")
    with run_lock(tmp_path, first=True):
        assert read_owner(tmp_path / NAME).process == os.getpid()
    with run_lock(tmp_path, first=False):
        assert not (tmp_path / NAME).exists()
