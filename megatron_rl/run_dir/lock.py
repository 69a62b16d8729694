"""One writer per run directory: a lock file that names its owner, so that a crash leaves no lock to remove by hand.

The owner touches the file every `TOUCH_SECONDS`. A lock is stale when its process has ended (same host), when it is of
an earlier start of our own SLURM job (a requeued job finds its own lock), or when it was not touched for
`STALE_SECONDS` (a node that died). Checking and taking it happen under `flock` on a file beside it, so that of two
waiting processes one wins. An owner that finds its lock taken (it was suspended for longer than `STALE_SECONDS`) ends
at once: it must not write another byte.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from megatron_rl.errors import LaunchError
from megatron_rl.files import write_text

NAME = "run.lock"
TOUCH_SECONDS, STALE_SECONDS = 5.0, 45.0
"""Seconds between two touches, and without a touch until the owner counts as dead."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    token: str
    host: str
    process: int
    started: str
    """Start time of the process in kernel ticks: a process number is used again, the pair is not."""
    job: str
    """SLURM job id, empty outside SLURM."""
    restart: int
    """How often SLURM has requeued that job."""


class RunLock:
    """The lock of a run directory, held until `release`. `run_lock` is its context manager.

    Args:
        directory: is made if it does not exist.

    Raises:
        LaunchError: another living process holds it; names host, process and SLURM job.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.owner = Owner(
            uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            _started(os.getpid()),
            os.environ.get("SLURM_JOB_ID", ""),
            int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(self.path):
            holder = read_owner(self.path)
            if holder is not None and _alive(holder, self.path, self.owner):
                raise _refused(holder, self.path)
            write_text(self.path, json.dumps(asdict(self.owner)))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="run-lock", daemon=True)
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether the lock is still ours."""
        return read_owner(self.path) == self.owner

    def release(self) -> None:
        """Give the lock back."""
        self._ended.set()
        self._thread.join()
        with _exclusive(self.path):
            if self.held:
                self.path.unlink()

    def _touch(self) -> None:
        while not self._ended.wait(TOUCH_SECONDS):
            with _exclusive(self.path):
                if not self.held:
                    _log.critical("%s was taken over: this process ends without another write", self.path)
                    os._exit(1)
                os.utime(self.path)


@contextmanager
def run_lock(directory: str | Path, *, first: bool) -> Iterator[None]:
    """Hold the lock of a run directory; only the first rank takes it.

    Args:
        directory: the run directory.
        first: whether this is the first rank.

    Raises:
        LaunchError: on the first rank, see `RunLock`.
    """
    lock = RunLock(Path(directory)) if first else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock file names; None: there is no file, or it is not legible."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _alive(holder: Owner, path: Path, us: Owner) -> bool:
    if holder.job and holder.job == us.job and holder.restart < us.restart:
        return False
    if holder.host == us.host:
        return holder.started != "" and _started(holder.process) == holder.started
    return time.time() - path.stat().st_mtime < STALE_SECONDS


def _started(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path.with_name(path.name + ".guard"), "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _refused(holder: Owner, path: Path) -> LaunchError:
    job = f", SLURM job {holder.job}" if holder.job else ""
    return LaunchError(
        "another process trains in this run directory",
        file=path,
        found=f"process {holder.process} on {holder.host}{job}",
        expected="one process a run directory",
        setting="output=ANOTHER_DIRECTORY, or end that process first",
    )
