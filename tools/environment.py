"""The cached virtual environment of a checkout: where it lies and how it is installed.

    python3.11 tools/environment.py path    requirements/lock-py311.txt    # prints the folder
    python3.11 tools/environment.py install requirements/lock-py311.txt    # makes it ready; does nothing if it is

The Python that runs this script is the one the environment is made of. Standard library only, because it runs before
anything is installed.

Invariants:

* The folder's name depends only on the lock file's bytes and the Python version, so checkouts share it. The package
  itself is not installed into it: a checkout puts itself on PYTHONPATH.
* `STAMP`, inside the folder, holds the key only once everything is installed; any other content means "unfinished".
* An exclusive lock beside the folder is held while it is built.
* A folder without `STAMP` that is not empty was made by somebody else and is never touched.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STAMP = ".megatron_rl_environment"
UNFINISHED = "unfinished"
NO_DEPS = "# environment: no-deps"
"""A line of a lock file whose packages name others that it leaves out: what it lists is installed, nothing checked."""


def key(lock: Path) -> str:
    """16 hex digits of SHA-256 over the lock file's bytes and the running Python's version."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return hashlib.sha256(lock.read_bytes() + version.encode()).hexdigest()[:16]


def folder(lock: Path) -> Path:
    """Where the environment of `lock` lies: `$MEGATRON_RL_VENV`, else a folder of the user's cache named by `key`."""
    chosen = os.environ.get("MEGATRON_RL_VENV")
    if chosen:
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megatron_rl" / f"venv-{key(lock)}"


def is_ready(path: Path, lock: Path) -> bool:
    """Whether `path` was completely installed from `lock` and its interpreter still exists."""
    stamp = path / STAMP
    return stamp.is_file() and stamp.read_text() == key(lock) and (path / "bin" / "python").exists()


def install(lock: Path, fill: Callable[[Path, Path], None] | None = None) -> Path:
    """Makes the environment of `lock` ready and returns its folder.

    Args:
        lock: requirements file of exact versions.
        fill: puts the packages into a folder, called as `fill(path, lock)`; the default is `venv` and `pip`.

    Raises:
        SystemExit: wrong Python for this lock file, or the folder belongs to somebody else, or pip failed.
    """
    _check_python(lock)
    path = folder(lock)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(path.with_name(path.name + ".lock")):
        if not is_ready(path, lock):
            _clear(path)
            (path / STAMP).write_text(UNFINISHED)
            (fill or _fill)(path, lock)
            (path / STAMP).write_text(key(lock))
    return path


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    with lock_file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another installation that holds {lock_file}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _check_python(lock: Path) -> None:
    wanted = re.search(r"py(\d)(\d+)", lock.stem)
    found = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted and f"{wanted[1]}.{wanted[2]}" != found:
        sys.exit(f"{lock} is for Python {wanted[1]}.{wanted[2]}, found {found} ({sys.executable}). Change: PYTHON=…")


def _clear(path: Path) -> None:
    if path.exists() and any(path.iterdir()):
        if not (path / STAMP).is_file():
            sys.exit(f"{path} is not empty and was not made by `make setup`; not touching it. Change: MEGATRON_RL_VENV")
        # Renamed first: an interrupted deletion must not leave a half-empty folder without its stamp.
        trash = path.with_name(path.name + ".old")
        shutil.rmtree(trash, ignore_errors=True)
        path.rename(trash)
        shutil.rmtree(trash)
    path.mkdir(exist_ok=True)


def _fill(path: Path, lock: Path) -> None:
    print(f"installing {lock} into {path} (about two minutes)", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", str(path)]).returncode:
        sys.exit(f"{sys.executable} -m venv failed. On Debian: apt-get install python3-venv")
    # -I: PYTHONPATH and the user's site-packages must not hide a package that is missing from the lock file.
    pip = [str(path / "bin" / "python"), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    install = ["install", "--quiet", "--only-binary=:all:", "-r", str(lock)]
    bare = NO_DEPS in lock.read_text().splitlines()
    # What is imported is compiled then; the rest of so large an installation never is.
    steps = [[*install, "--no-deps", "--no-compile"]] if bare else [install, ["check"]]
    for arguments in steps:
        if subprocess.run([*pip, *arguments]).returncode:
            sys.exit(f"pip {arguments[0]} failed for {lock}; run `make setup` again to retry")


def main() -> None:
    """Command line: `environment.py path|install LOCK`."""
    parser = argparse.ArgumentParser(description="The cached virtual environment of this checkout.")
    parser.add_argument("action", choices=("path", "install"))
    parser.add_argument("lock", type=Path)
    chosen = parser.parse_args()
    print(folder(chosen.lock) if chosen.action == "path" else f"ready: {install(chosen.lock)}")


if __name__ == "__main__":
    main()
