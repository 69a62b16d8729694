"""A published weights directory: which version it is, and checksums of what it holds.

Invariants:

* The manifest is written last and appears whole; a directory that has one is complete.
* Weights and config.json are listed; files that tell about them (the canary) are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from megatron_rl.errors import CheckpointError, EngineVersionError

PUBLICATION_FILE = "publication.json"
LISTED = ("*.safetensors", "*.safetensors.index.json", "config.json")
_CHUNK = 16 << 20


def write_publication(directory: str | Path, version: int) -> Path:
    """List sizes and xxh3-64 checksums of the directory's weights under `version`."""
    directory = Path(directory)
    files = {file.name: {"bytes": file.stat().st_size, "xxh3": _checksum(file)} for file in _listed(directory)}
    target = directory / PUBLICATION_FILE
    partial = target.with_name(f".{PUBLICATION_FILE}.{os.getpid()}")
    partial.write_text(json.dumps({"version": version, "files": files}, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def check_publication(directory: str | Path, version: int) -> bool:
    """Compare a directory with its manifest.

    Args:
        directory: an HF checkpoint directory.
        version: what is expected there.

    Returns:
        False if there is no manifest (a checkpoint that nobody published), True if all agrees.

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
        found, files = int(recorded["version"]), dict(recorded["files"])
    except (ValueError, KeyError, TypeError) as error:
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


def _check_file(file: Path, entry: dict) -> None:
    found = {"bytes": file.stat().st_size}
    if found["bytes"] == entry["bytes"]:
        found["xxh3"] = _checksum(file)
    if found != entry:
        raise CheckpointError("a published file was altered or is incomplete", file=file, found=found, expected=entry)


def _listed(directory: Path) -> Iterator[Path]:
    yield from sorted(file for pattern in LISTED for file in directory.glob(pattern))


def _checksum(file: Path) -> str:
    state = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()
