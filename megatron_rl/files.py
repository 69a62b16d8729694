"""Files that appear whole and durable, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


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
