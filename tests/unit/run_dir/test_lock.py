"""One writer a run directory; a crash leaves nothing to clean up by hand, and no fault of storage makes two."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl.errors import LaunchError
from megatron_rl.processes import place, start_time
from megatron_rl.run_dir import lock
from megatron_rl.run_dir.lock import NAME, Owner, RunLock, read_owner, run_lock

QUICK = {"TOUCH_SECONDS": 0.1, "GIVE_UP_SECONDS": 0.6, "STALE_SECONDS": 1.5, "LOOK_SECONDS": 0.05}
HOLD = f"""
import errno, os, sys, time
from pathlib import Path
from megatron_rl.run_dir import lock
vars(lock).update({QUICK!r})
held = lock.RunLock(Path(sys.argv[1]))
print("held", flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in QUICK.items():
        monkeypatch.setattr(lock, name, seconds)


@contextmanager
def holder(directory: Path, then: str = "time.sleep(60)", **environment: str) -> Iterator[subprocess.Popen]:
    """Another living process with the lock, which then does something."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + then, str(directory)], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pretend(directory: Path, **changes) -> None:
    """The lock file of a process elsewhere."""
    owner = replace(Owner("t", "another-host", 1, "2", "", 0, "another-place"), **changes)
    (directory / NAME).write_text(json.dumps(asdict(owner)))


@contextmanager
def touching(path: Path, ahead: float = 0.0) -> Iterator[None]:
    """Somebody whose clock differs keeps touching it, without any lock."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(lock.TOUCH_SECONDS):
            now = time.time() + ahead
            with suppress(FileNotFoundError):
                os.utime(path, (now, now))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_second_process_is_refused_until_the_first_has_crashed(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(LaunchError, match="another process trains") as caught:
            RunLock(tmp_path)
        assert str(first.pid) in str(caught.value) and "output" in caught.value.setting
    assert (tmp_path / NAME).exists()
    start = time.monotonic()
    RunLock(tmp_path).release()
    # That a process has ended needs no watching.
    assert time.monotonic() - start < lock.STALE_SECONDS
    assert not (tmp_path / NAME).exists()


def test_a_process_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    parent = {"place": place(), "process": os.getppid()}
    pretend(tmp_path, **parent, started=start_time(os.getppid()))
    with pytest.raises(LaunchError, match=str(os.getppid())):
        RunLock(tmp_path)
    pretend(tmp_path, **parent, started="1")
    mine = RunLock(tmp_path)
    assert mine.held and read_owner(tmp_path / NAME).process == os.getpid()
    mine.release()


def test_a_host_is_dead_once_its_lock_was_watched_without_a_change(tmp_path: Path, caplog) -> None:
    pretend(tmp_path)
    start = time.monotonic()
    RunLock(tmp_path).release()
    assert time.monotonic() - start > lock.STALE_SECONDS
    assert "process 1 on another-host, which is dead: the lock did not change" in caplog.text


@pytest.mark.parametrize("ahead", [-3600.0, -46.0, 0.0, 46.0])
def test_a_living_owner_elsewhere_is_refused_whatever_the_clocks_say(tmp_path: Path, ahead: float) -> None:
    pretend(tmp_path)
    os.utime(tmp_path / NAME, (time.time() + ahead,) * 2)
    with touching(tmp_path / NAME, ahead), pytest.raises(LaunchError, match="another-host: it touches the lock"):
        RunLock(tmp_path)
    assert read_owner(tmp_path / NAME).host == "another-host"


def test_a_living_owner_in_another_pid_namespace_is_refused(tmp_path: Path) -> None:
    """Same host name, and no process here has that number."""
    pretend(tmp_path, host=socket.gethostname(), process=2**22 + 1)
    with touching(tmp_path / NAME), pytest.raises(LaunchError, match=f"process {2**22 + 1} on .*: it touches"):
        RunLock(tmp_path)


def test_a_lock_of_a_release_without_places_is_watched(tmp_path: Path) -> None:
    pretend(tmp_path)
    values = json.loads((tmp_path / NAME).read_text())
    del values["place"]
    (tmp_path / NAME).write_text(json.dumps(values | {"a key of a newer one": 1}))
    assert read_owner(tmp_path / NAME).host == "another-host"
    with touching(tmp_path / NAME), pytest.raises(LaunchError, match="another-host"):
        RunLock(tmp_path)


def test_a_requeued_job_takes_its_own_lock_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with touching(tmp_path / NAME):
        pretend(tmp_path, job="41", restart=0)
        start = time.monotonic()
        RunLock(tmp_path).release()
        assert time.monotonic() - start < lock.STALE_SECONDS
    pretend(tmp_path, job="40", restart=0)
    with touching(tmp_path / NAME), pytest.raises(LaunchError, match="SLURM job 40"):
        RunLock(tmp_path)
    pretend(tmp_path, job="41", restart=1)
    with touching(tmp_path / NAME), pytest.raises(LaunchError):
        RunLock(tmp_path)


@pytest.mark.parametrize("count", ["x", "", "-1", "²", "9" * 5000, "1.5"])
def test_a_restart_count_that_is_no_number_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    with run_lock(tmp_path, first=True):
        assert read_owner(tmp_path / NAME).restart == 0


def contend(directory: Path, results, all_have_tried) -> None:
    try:
        RunLock(directory)
        results.put(1)
    except LaunchError:
        results.put(0)
    # A winner that ended before the last one looked would leave a dead lock behind.
    all_have_tried.wait()


def without_flock(_descriptor: int, _operation: int) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("flock", [True, False])
def test_of_many_that_find_a_dead_lock_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: bool) -> None:
    if not flock:
        monkeypatch.setattr(lock.fcntl, "flock", without_flock)
        # Who comes later than this after the first would take a lock that another was granted.
        monkeypatch.setattr(lock, "TOUCH_SECONDS", 2.0)
        monkeypatch.setattr(lock, "GIVE_UP_SECONDS", 10.0)
    pretend(tmp_path)
    context = multiprocessing.get_context("fork")
    results, all_have_tried = context.Queue(), context.Event()
    processes = [context.Process(target=contend, args=(tmp_path, results, all_have_tried)) for _ in range(6)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 1
    all_have_tried.set()
    for process in processes:
        process.join()


def test_a_file_system_without_flock_has_locks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", without_flock)
    mine = RunLock(tmp_path)
    with pytest.raises(LaunchError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    mine.release()
    assert not (tmp_path / NAME).exists()


def test_a_lock_lost_ends_its_process(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        pretend(tmp_path)
        assert process.wait(timeout=30) == 1
        assert "another's now: process 1 on another-host" in process.stderr.read()
        assert read_owner(tmp_path / NAME).host == "another-host"


FAULTS = {
    # What a call of the heartbeat raises, and for how many calls.
    "one touch": ("utime", errno.EIO, 1),
    "one look": ("open", errno.ESTALE, 1),
    "some touches": ("utime", errno.ESTALE, 3),
}
BREAK = """
real, left = os.{name}, {times}
def broken(*args, **options):
    global left
    if str(args[0]).startswith(sys.argv[1]) and left > 0:
        left -= 1
        raise OSError({number}, os.strerror({number}), args[0])
    return real(*args, **options)
os.{name} = broken
while left: time.sleep(0.01)
print("broken", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_of_storage_that_pass_end_nobody_and_grant_nobody(tmp_path: Path, fault: str) -> None:
    name, number, times = FAULTS[fault]
    with holder(tmp_path, BREAK.format(name=name, number=number, times=times)) as process:
        assert process.stdout.readline() == "broken\n"
        before = (tmp_path / NAME).stat().st_mtime_ns
        time.sleep(lock.GIVE_UP_SECONDS)
        assert process.poll() is None and (tmp_path / NAME).stat().st_mtime_ns > before


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 60_000, b"null", b'{"token": 1}', None])
def test_an_owner_mends_a_lock_that_was_torn_or_removed(tmp_path: Path, content: bytes | None) -> None:
    with holder(tmp_path) as process:
        owner = read_owner(tmp_path / NAME)
        (tmp_path / NAME).unlink() if content is None else (tmp_path / NAME).write_bytes(content)
        until(lambda: read_owner(tmp_path / NAME) == owner)
        time.sleep(lock.GIVE_UP_SECONDS)
        assert process.poll() is None and read_owner(tmp_path / NAME) == owner


def test_nobody_is_granted_a_torn_lock_whose_owner_lives(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"token": "3f')
    with touching(tmp_path / NAME), pytest.raises(LaunchError, match="unreadable.*touches"):
        RunLock(tmp_path)


HANG = """
real = os.utime
os.utime = lambda *args, **options: time.sleep(60)
"""
BROKEN_FOR_GOOD = BREAK.format(name="utime", number=errno.EIO, times=10**9)


@pytest.mark.parametrize(
    ("then", "why"), [(BROKEN_FOR_GOOD, "Input/output error"), (HANG, "does not answer")], ids=["errors", "hangs"]
)
def test_an_owner_that_cannot_touch_its_lock_ends_before_another_is_granted_it(
    tmp_path: Path, then: str, why: str
) -> None:
    with holder(tmp_path, then + "\ntime.sleep(60)") as process:
        # Judged from another host, by watching alone.
        owner = read_owner(tmp_path / NAME)
        ended = threading.Event()
        threading.Thread(target=lambda: (process.wait(), ended.set())).start()
        watched = lock.Silence(3 * lock.LOOK_SECONDS)
        while watched.look(lock.look(tmp_path / NAME)) < lock.STALE_SECONDS:
            time.sleep(lock.LOOK_SECONDS)
        assert ended.is_set() and process.returncode == 1
        assert f"could not be touched for {lock.GIVE_UP_SECONDS:g} s" in (said := process.stderr.read()) and why in said
        assert read_owner(tmp_path / NAME) == owner


def test_a_deleted_run_directory_ends_its_owner(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with holder(directory) as process:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        assert process.wait(timeout=30) == 1
        assert "No such file or directory" in process.stderr.read()


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(lock.time, "monotonic", lambda: now)
    silence = lock.Silence(3.0)
    found = []
    for now, seen in ((0.0, "a"), (1.0, "a"), (1001.0, "a"), (1002.0, "b"), (1003.0, "b")):  # noqa: B007
        found.append(silence.look(seen))
    assert found == [0, 1, 4, 0, 1] and silence.changes == 1


def test_errors_that_pass_while_it_is_taken_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(tmp_path):
        real, calls = lock.look, []

        def stale(path: Path) -> lock.Look:
            calls.append(path)
            if len(calls) <= 2:
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(path)

        monkeypatch.setattr(lock, "look", stale)
        with pytest.raises(LaunchError, match="it is running"):
            RunLock(tmp_path)
    assert len(calls) == 3


@pytest.mark.parametrize("what", ["a file", "a directory", "unreadable for ever", "a pipe"])
def test_a_directory_that_cannot_be_locked_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "a file":
        (tmp_path / "run").touch()
    elif what == "a directory":
        (tmp_path / "run" / NAME).mkdir(parents=True)
    elif what == "a pipe":
        (tmp_path / "run").mkdir()
        os.mkfifo(tmp_path / "run" / NAME)
        os.mkfifo(tmp_path / "run" / (NAME + ".guard"))
        RunLock(tmp_path / "run").release()
        return
    else:

        def unreadable(_: Path) -> lock.Look:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(lock, "look", unreadable)
    with pytest.raises(LaunchError, match="cannot be locked"):
        RunLock(tmp_path / "run")


def test_an_illegible_lock_is_taken_once_it_was_watched(tmp_path: Path, caplog) -> None:
    (tmp_path / NAME).write_text("{")
    with caplog.at_level(logging.WARNING), run_lock(tmp_path, first=True):
        assert read_owner(tmp_path / NAME).process == os.getpid()
    assert "unreadable" in caplog.text and "taken over" in caplog.text
    with run_lock(tmp_path, first=False):
        assert not (tmp_path / NAME).exists()


def test_a_release_that_fails_hides_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    with run_lock(tmp_path, first=True):
        monkeypatch.setattr(lock.Path, "unlink", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
    assert "could not be given back" in caplog.text


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
