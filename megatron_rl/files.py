"""Files and directories that appear whole and durable, or not at all.

A directory is filled under a `temporary_name` beside its place and then named::

    .NAME.<writer>-<unique>.partial    being filled, or whole and not yet named
    .NAME.<writer>-<unique>.replaced   what had the name, from the first rename of `replace_directory` until removed

No two writers, and no two attempts of one, share such a name: what a killed process leaves is in nobody's way. `sweep`
removes it, and gives a directory that was renamed away its name back where the new one never came.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal
from uuid import uuid4

from megatron_rl.processes import has_ended, place, start_time

_UNIQUE = r"(?P<place>[0-9a-f]*)-(?P<number>\d+)-(?P<started>\d*)-[0-9a-f]{8}"
_log = logging.getLogger(__name__)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` so that it appears whole and durable, replacing what was there, or not at all.

    Raises:
        OSError: the file system refuses; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    make_durable(path.parent)


def write_text(path: Path, text: str) -> None:
    """`atomic_file` with this text."""
    with atomic_file(path) as stream:
        stream.write(text.encode())


def make_durable(path: Path) -> None:
    """Flush a file or a directory to disk: a rename or removal is durable only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(target: Path, kind: Literal["partial", "replaced"] = "partial") -> Path:
    """A hidden name beside `target` that nothing has had before, and that says which process took it."""
    writer = f"{place()}-{os.getpid()}-{start_time(os.getpid())}"
    return target.with_name(f".{target.name}.{writer}-{uuid4().hex[:8]}.{kind}")


def name_directory(directory: Path, target: Path) -> None:
    """Give a whole, durable directory its name.

    Raises:
        OSError: something has the name already, other than an empty directory.
    """
    os.rename(directory, target)
    make_durable(target.parent)


def replace_directory(directory: Path, target: Path) -> None:
    """Give a whole, durable directory its name. What had the name is renamed away first, then removed.

    Raises:
        OSError: the file system refuses; `target` is what it was.
    """
    replaced = temporary_name(target, "replaced")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, replaced)
    try:
        name_directory(directory, target)
    except OSError:
        if replaced.exists() and not target.exists():
            os.rename(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def sweep(folder: Path, names: str, *, alone: bool = False) -> None:
    """Remove what killed writers of directories have left in a folder. Nothing under a visible name is removed.

    Args:
        folder: need not exist.
        names: regular expression of the directories' names.
        alone: no other process writes these directories now, as where the caller holds the run's lock: every hidden
            name is a dead writer's. Otherwise only names of processes that are known to have ended are.
    """
    unique = re.compile(rf"\.(?P<name>{names})\.{_UNIQUE}\.(?P<kind>partial|replaced)")
    # Directories that are filled by writers with temporary names of their own have such a name twice.
    hidden = re.compile(rf"\.+(?:{names})\.(?:.+\.)?(?:partial|staged|replaced)")
    for left in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = unique.fullmatch(left.name)
        dead = hidden.fullmatch(left.name) if alone else match and _is_dead(match)
        if not dead or left.is_symlink() or not left.is_dir():
            continue
        if match and match["kind"] == "replaced" and not (folder / match["name"]).exists():
            _log.warning("%s was being replaced when its writer died: it has its name back", folder / match["name"])
            name_directory(left, folder / match["name"])
        else:
            shutil.rmtree(left, ignore_errors=True)


def _is_dead(writer: re.Match[str]) -> bool:
    return has_ended(writer["place"], int(writer["number"]), writer["started"]) is True
