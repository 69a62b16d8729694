"""The manifest of a published weights directory: its version, and checksums of its files.

Invariants:

* The manifest is written last and appears whole; a directory that has one is complete.
* Weights and config.json are listed; files about them (the canary) are not.
* A file is listed as pieces that follow each other without gaps: the writer hashes each piece as it writes it, a reader
  hashes several pieces in parallel.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron_rl.errors import CheckpointError, EngineVersionError
from megatron_rl.files import write_text

PUBLICATION_FILE = "publication.json"
LISTED = ("*.safetensors", "*.safetensors.index.json", "config.json")
_PIECE = 16 << 20
"""Bytes of a piece of a file that was not hashed when it was written."""
_BUFFER = 1 << 20
"""Bytes read at a time, so that they are hashed while they are in the processor's cache."""
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Entry:
    size: int
    pieces: Sequence[tuple[int, str]]


def write_publication(
    directory: str | Path, version: int, pieces: Mapping[str, Sequence[tuple[int, str]]] | None = None
) -> Path:
    """Write sizes and xxh3-64 checksums of the directory's weights into its manifest; returns the manifest's path.

    Args:
        directory: an HF checkpoint directory, complete but for the manifest.
        version: its weight version.
        pieces: file name → (bytes, xxh3-64 in hexadecimal) of its pieces, for files that were hashed when they were
            written (`hf.writer.StreamingWriter.pieces`). Other files are read.
    """
    directory, known = Path(directory), pieces or {}
    files = {
        file.name: {"bytes": file.stat().st_size, "pieces": known.get(file.name) or _hashed(file)}
        for file in _listed(directory)
    }
    target = directory / PUBLICATION_FILE
    write_text(target, json.dumps({"version": version, "files": files}) + "\n")
    return target


def check_publication(directory: str | Path, version: int) -> bool:
    """Compare a directory with its manifest.

    Args:
        directory: an HF checkpoint directory.
        version: the version it is expected to hold.

    Returns:
        False if there is no manifest (a checkpoint that was not published), True if everything agrees.

    Raises:
        CheckpointError: a file is missing, left over, of another size or content, or the manifest is damaged.
        EngineVersionError: the manifest is of another version.
    """
    directory = Path(directory)
    manifest = directory / PUBLICATION_FILE
    if not manifest.exists():
        return False
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        found = int(recorded["version"])
        files = {name: _Entry(entry["bytes"], entry["pieces"]) for name, entry in recorded["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("damaged manifest", file=manifest, found=error, expected="version and files") from error
    if found != version:
        raise EngineVersionError("the directory holds another version", file=directory, found=found, expected=version)
    present = {file.name for file in _listed(directory)}
    if present != set(files):
        raise CheckpointError(
            "published files are missing or left over", file=directory, found=sorted(present), expected=sorted(files)
        )
    for name, entry in files.items():
        _check_file(directory / name, entry)
    return True


def _check_file(file: Path, entry: _Entry) -> None:
    found, sizes = file.stat().st_size, [size for size, _ in entry.pieces]
    if found != entry.size or sum(sizes) != entry.size:
        raise CheckpointError(
            "a published file is incomplete, or its manifest is", file=file, field="bytes", found=found,
            expected=entry.size,
        )  # fmt: skip
    for i, (digest, (_, expected)) in enumerate(zip(_digests(file, sizes), entry.pieces, strict=True)):
        if digest != expected:
            raise CheckpointError(
                "a published file was altered", file=file, field=f"xxh3 of piece {i} at byte {sum(sizes[:i])}",
                found=digest, expected=expected,
            )  # fmt: skip


def _listed(directory: Path) -> Iterator[Path]:
    yield from sorted(file for pattern in LISTED for file in directory.glob(pattern))


def _hashed(file: Path) -> list[tuple[int, str]]:
    size = file.stat().st_size
    sizes = [min(_PIECE, size - start) for start in range(0, size, _PIECE)]
    return list(zip(sizes, _digests(file, sizes), strict=True))


def _digests(file: Path, sizes: Sequence[int]) -> list[str]:
    """xxh3-64 of consecutive pieces. Read, not mapped: a mapped file that is truncated meanwhile kills the process."""
    starts = itertools.accumulate(sizes, initial=0)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            # Several pieces a task: a single one may be as small as a norm.
            spans = list(zip(starts, sizes, strict=False))
            share = -(-len(spans) // (8 * _THREADS)) or 1
            shares = [spans[first : first + share] for first in range(0, len(spans), share)]
            return [
                digest for part in threads.map(lambda part: _read_digests(descriptor, part), shares) for digest in part
            ]
    finally:
        os.close(descriptor)


def _read_digests(descriptor: int, spans: Sequence[tuple[int, int]]) -> list[str]:
    """xxh3-64 of the spans (first byte, bytes) of a file."""
    buffer, digests = memoryview(bytearray(_BUFFER)), []
    for start, size in spans:
        state, end = xxhash.xxh3_64(), start + size
        while start < end:
            count = os.preadv(descriptor, [buffer[: min(_BUFFER, end - start)]], start)
            if not count:
                break
            state.update(buffer[:count])
            start += count
        digests.append(state.hexdigest())
    return digests
