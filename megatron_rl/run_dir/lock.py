"""One writer per run directory: a lock file that names its owner, so that a crash leaves no lock to remove by hand.

    owner    touches the file every TOUCH_SECONDS, and ends at once when
               the file names another owner (it was suspended for long), or
               no touch succeeded for GIVE_UP_SECONDS: others may soon take it for dead
    another  takes the lock where the owner is dead:
               its process has ended, seen from the same host and namespace of process numbers; or
               it is an earlier start of our own SLURM job (a requeued job finds its own lock); or
               the file did not change while it was watched for STALE_SECONDS
             and is refused as soon as it sees the owner's process, or a change

Clocks of two hosts are never compared: only changes count, each timed by the clock of who watches. Checking and taking
happen under `flock` on a file beside the lock, so that of two waiting processes one wins. Where the file system has no
`flock`, who has written its name looks again after TOUCH_SECONDS: of several, the last one finds its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from megatron_rl.errors import LaunchError
from megatron_rl.files import write_text
from megatron_rl.processes import has_ended, place, start_time

NAME = "run.lock"
TOUCH_SECONDS, GIVE_UP_SECONDS, STALE_SECONDS = 5.0, 30.0, 45.0
"""Between two touches; without a touch until the owner ends; without a change until it counts as dead. In this order:
an owner that cannot touch its lock has ended before another is granted it."""
LOOK_SECONDS = 1.0
"""Between two looks at a lock that is watched."""
_NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_LONGEST = 1 << 16
"""Bytes of a lock file that are read; it has some hundred."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    token: str
    host: str
    process: int
    started: str
    """`processes.start_time`: a process number is used again, the pair is not."""
    job: str
    """SLURM job id, empty outside SLURM."""
    restart: int
    """How often SLURM has requeued that job."""
    place: str = ""
    """`processes.place`, which gave out the process number; empty: not known."""

    @classmethod
    def this_process(cls) -> Owner:
        """This process, with a token of its own."""
        number, restart = os.getpid(), os.environ.get("SLURM_RESTART_COUNT", "")
        job = os.environ.get("SLURM_JOB_ID", "")
        known = int(restart) if re.fullmatch("[0-9]{1,9}", restart) else 0
        return cls(uuid4().hex, socket.gethostname(), number, start_time(number), job, known, place())

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + (f", SLURM job {self.job}" if self.job else "")


@dataclass(frozen=True)
class Look:
    """What one look at a lock file shows. Two that are equal: nobody touched it between them."""

    content: bytes | None = None
    """None: there is no file."""
    changed: int = 0
    """Modification time in nanoseconds, of which only changes count."""
    inode: int = 0

    @property
    def owner(self) -> Owner | None:
        """The owner that the file names; None: there is no file, or it is not legible."""
        try:
            values = json.loads(self.content or b"")
            known = {field.name: values[field.name] for field in fields(Owner) if field.name in values}
            owner = Owner(**known)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (owner.token, owner.host, owner.started, owner.job, owner.place)
        numbers = all(type(number) is int and 0 <= number < 2**31 for number in (owner.process, owner.restart))
        return owner if numbers and owner.process and all(type(text) is str for text in texts) else None


class RunLock:
    """The lock of a run directory, held until `release`. `run_lock` is its context manager.

    Waits up to STALE_SECONDS where only watching can tell whether the owner lives. A thread touches the lock; where it
    is lost the process ends at once with status 1 and a message, without another write.

    Args:
        directory: is made if it does not exist.

    Raises:
        LaunchError: another living process holds it, or cannot be told from one; or the directory refuses.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.owner = Owner.this_process()
        self._trouble = ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._touched = time.monotonic()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"run-lock-{work.__name__}", daemon=True)
            for work in (self._keep_touching, self._give_up)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def held(self) -> bool:
        """Whether the lock is still ours.

        Raises:
            OSError: the file cannot be read.
        """
        return look(self.path).owner == self.owner

    def release(self) -> None:
        """Give the lock back."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        try:
            with _exclusive(self.path):
                if self.held:
                    self.path.unlink()
        except OSError as error:
            _log.warning("%s could not be given back: %r", self.path, error)

    def _take(self) -> None:
        watched, since = Silence(3 * LOOK_SECONDS), time.monotonic()
        while True:
            try:
                with _exclusive(self.path) as exclusive:
                    seen = look(self.path)
                    reason = _why_free(seen, watched.look(seen), watched.changes > 0, self.owner, self.path)
                    if reason is not None:
                        write_text(self.path, json.dumps(asdict(self.owner)))
                        break
            except OSError as error:
                if time.monotonic() - since > STALE_SECONDS or isinstance(error, _LASTING):
                    raise
                _log.warning("%s cannot be read, trying again: %r", self.path, error)
            else:
                if watched.looks == 1:
                    _log.warning("%s is there, of %s: watching it for %g s", self.path, _name(seen), STALE_SECONDS)
            time.sleep(LOOK_SECONDS)
        if reason:
            _log.warning("%s was of %s, which is %s: taken over", self.path, _name(seen), reason)
        if not exclusive:
            time.sleep(TOUCH_SECONDS)
            if (owner := look(self.path).owner) != self.owner:
                raise _refused(self.path, "another process" if owner is None else str(owner), "it came later")

    def _keep_touching(self) -> None:
        while not self._ended.wait(TOUCH_SECONDS):
            try:
                with _exclusive(self.path):
                    self._touch()
            except Exception as error:  # noqa: BLE001 - nothing may end this thread but `release`
                self._report(f"it cannot be touched: {error!r}")
            else:
                self._trouble = ""

    def _touch(self) -> None:
        now, seen = time.monotonic(), look(self.path)
        if (owner := seen.owner) is not None and owner != self.owner:
            self._lose(f"is another's now: {owner}")
        elif owner is not None:
            os.utime(self.path)
        elif now - self._touched < GIVE_UP_SECONDS:
            # Since our last touch nobody can have been granted it, so whatever did this was no owner.
            self._report("it was removed" if seen.content is None else f"it is unreadable: {seen.content[:40]!r}")
            write_text(self.path, json.dumps(asdict(self.owner)))
        else:
            raise FileNotFoundError(errno.ENOENT, "removed or unreadable", str(self.path))
        self._touched = now

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            _log.warning("%s: %s; trying again", self.path, trouble)
        self._trouble = trouble

    def _give_up(self) -> None:
        """A thread without input or output of its own: that may hang."""
        untouched = Silence(GIVE_UP_SECONDS / 10)
        while not self._ended.wait(GIVE_UP_SECONDS / 30):
            if untouched.look(self._touched) > GIVE_UP_SECONDS:
                trouble = self._trouble or "storage does not answer"
                self._lose(f"could not be touched for {GIVE_UP_SECONDS:g} s: {trouble}")

    def _lose(self, how: str) -> None:
        # Not an exception: the main thread may be in the middle of a write.
        _log.critical("%s %s: this process ends without another write", self.path, how)
        os._exit(1)


class Silence:
    """For how long something has not changed, by this process's clock. Time in which nobody looked does not count: a
    process that was suspended, or whose storage hung, has not seen that nothing happened.

    Args:
        most: seconds that count between two looks.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self.looks, self.changes, self._seconds, self._at = 0, 0, 0.0, 0.0
        self._last: Any = None

    def look(self, now_seen: Any) -> float:
        """Compare with the last look; returns seconds without a change."""
        now = time.monotonic()
        if self.looks and now_seen == self._last:
            self._seconds += min(now - self._at, self._most)
        else:
            self.changes += self.looks > 0
            self._seconds = 0.0
        self.looks, self._last, self._at = self.looks + 1, now_seen, now
        return self._seconds


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


def look(path: Path) -> Look:
    """Look at a lock file.

    Raises:
        OSError: it cannot be read, for now or for good. That says nothing about its owner.
    """
    # Opened anew each time: a network file system then asks its server instead of answering from its cache. Without
    # O_NONBLOCK a pipe of this name would be waited for.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return Look()
    try:
        status = os.fstat(descriptor)
        return Look(os.read(descriptor, _LONGEST), status.st_mtime_ns, status.st_ino)
    finally:
        os.close(descriptor)


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock file names; None: there is no file, or it is not legible."""
    return look(path).owner


def _why_free(seen: Look, silence: float, changed: bool, us: Owner, path: Path) -> str | None:
    """Why a lock may be taken, empty where there is none; None: not known yet. Raises where its owner lives."""
    holder = seen.owner
    if seen.content is None:
        return ""
    if holder is not None:
        if holder.job and holder.job == us.job and holder.restart < us.restart:
            return "dead: it is an earlier start of this SLURM job"
        ended = has_ended(holder.place, holder.process, holder.started)
        if ended is not None and not ended:
            raise _refused(path, str(holder), "it is running")
        if ended:
            return "dead: its process has ended"
    if changed:
        raise _refused(path, _name(seen), "it touches the lock")
    if silence < STALE_SECONDS:
        return None
    return f"dead: the lock did not change for {STALE_SECONDS:g} s" + ("" if holder else ", and is unreadable")


def _name(seen: Look) -> str:
    return str(seen.owner or f"an unknown owner, for it is unreadable ({(seen.content or b'')[:40]!r})")


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Nobody else is in here for this lock; False: the file system has no `flock`, so others may be."""
    descriptor = os.open(path.with_name(path.name + ".guard"), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        yield _has_flock(descriptor)
    finally:
        os.close(descriptor)


def _has_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True


_LASTING = (PermissionError, IsADirectoryError, NotADirectoryError)


def _refused(path: Path, holder: str, why: str) -> LaunchError:
    return LaunchError(
        "another process trains in this run directory",
        file=path,
        found=f"{holder}: {why}",
        expected="one process a run directory",
        setting="output=ANOTHER_DIRECTORY, or end that process first",
    )


def _unusable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(
        "the run directory cannot be locked",
        file=error.filename or path,
        found=error.strerror or repr(error),
        expected="a directory to write in",
        setting="output",
    )
