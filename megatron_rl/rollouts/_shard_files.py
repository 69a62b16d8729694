"""Durable, atomic files and the manifest of a rollout directory.

A shard `NAME.arrow` is committed by its entry `NAME.arrow.json`; readers ignore anything without one. Each writer
creates its own two files, so that any number of ranks can write to one directory without a lock. `manifest.json`
additionally remembers which shards were there: a writer adds its own line, and one lost in a race is covered by the
entry. So a shard deleted together with its entry is still noticed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from megatron_rl.errors import RolloutError
from megatron_rl.files import atomic_file, write_text

MANIFEST = "manifest.json"
SUFFIX = ".arrow"
_ENTRY = ".json"
_CHUNK = 16 << 20


@dataclass(frozen=True)
class ShardInfo:
    """One line of the manifest."""

    file: str
    """File name inside the directory."""
    rows: int
    """Trajectories."""
    tokens: int
    """Raw tokens of all trajectories."""
    bytes: int
    """Size of the file."""
    xxh3_128: str
    """Hexadecimal checksum of the whole file."""


class _HashingSink:
    """The file object Arrow writes to: hashes what is meant to be written, before the disk can change it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.hash, self.size, self.closed = stream, xxhash.xxh3_128(), 0, False

    def write(self, data) -> int:
        view = memoryview(data)
        self.hash.update(view)
        self.size += view.nbytes
        return self.stream.write(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        self.closed = True


def commit_shard(directory: Path, name: str, table: pa.Table, *, tokens: int, replace: bool = False) -> ShardInfo:
    """Write `table` as the committed shard `name`.arrow of `directory` (made if absent).

    Raises:
        RolloutError: a committed shard of that name exists (unless `replace`), or the file system refuses the write
            (disk full, quota, permissions); then nothing new is visible and earlier shards are untouched.
    """
    path = directory / (name + SUFFIX)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not replace and is_committed(directory, name):
            raise RolloutError("shard exists already", file=path, found=name, expected="a name no writer used before")
        info = _write_table(path, table, tokens)
        write_text(entry_path(path), json.dumps(asdict(info), indent=1))
        _add_to_manifest(directory, info)
    except OSError as error:
        raise RolloutError(
            "shard could not be written",
            file=path,
            found=error,
            expected="a writable directory with free space",
            setting="the rollout directory",
        ) from error
    return info


def _write_table(path: Path, table: pa.Table, tokens: int) -> ShardInfo:
    with atomic_file(path) as stream:
        sink = _HashingSink(stream)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
            writer.write_table(table)
    return ShardInfo(path.name, table.num_rows, tokens, sink.size, sink.hash.hexdigest())


def is_committed(directory: Path, name: str) -> bool:
    """Whether the directory has a committed shard `name`.arrow."""
    return entry_path(directory / (name + SUFFIX)).exists()


def entry_path(shard: Path) -> Path:
    """Where the manifest entry of a shard file lies."""
    return shard.with_name(shard.name + _ENTRY)


def _add_to_manifest(directory: Path, info: ShardInfo) -> None:
    listed = {shard.file: shard for shard in _listed(directory)} | {info.file: info}
    content = {"shards": [asdict(listed[file]) for file in sorted(listed)]}
    write_text(directory / MANIFEST, json.dumps(content, indent=1))


def _listed(directory: Path) -> list[ShardInfo]:
    path = directory / MANIFEST
    return [_info(line, path) for line in _read_json(path).get("shards", ())] if path.exists() else []


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RolloutError("manifest is unreadable", file=path, found=error, expected="JSON") from error
    if not isinstance(content, dict):
        raise RolloutError("manifest is unreadable", file=path, found=type(content).__name__, expected="a JSON object")
    return content


def _info(content: Any, path: Path) -> ShardInfo:
    try:
        return ShardInfo(**content)
    except TypeError as error:
        raise RolloutError(
            "manifest entry is malformed", file=path, found=content, expected=list(ShardInfo.__annotations__)
        ) from error


def shard_paths(directory: Path, *, folders: str = ".", committed: bool = True) -> list[Path]:
    """Shard files of a directory, sorted by folder and name. Nothing is read, nothing compared with the manifest.

    Args:
        directory: where to look; it may be absent.
        folders: pattern of the folders: `.` the directory itself, `*` those in it, `**` all of them.
        committed: only shards that have an entry, whether or not the file is still there.
    """
    if not committed:
        return sorted(directory.glob(f"{folders}/*{SUFFIX}"))
    entries = sorted(directory.glob(f"{folders}/*{SUFFIX}{_ENTRY}"))
    return [entry.with_name(entry.name.removesuffix(_ENTRY)) for entry in entries]


def read_entry(shard: Path) -> ShardInfo | None:
    """The manifest entry of one shard file; None where it has none."""
    path = entry_path(shard)
    return _info(_read_json(path), path) if path.exists() else None


def read_manifest(directory: str | os.PathLike) -> tuple[ShardInfo, ...]:
    """Committed shards of a directory, in the order of their names.

    Raises:
        RolloutError: an entry is unreadable, or `manifest.json` lists a shard that is gone.
    """
    directory = Path(directory)
    shards = {}
    for path in map(entry_path, shard_paths(directory)):
        info = _info(_read_json(path), path)
        shards[info.file] = info
    for listed in _listed(directory):
        if listed.file not in shards:
            raise RolloutError(
                "a shard is missing",
                file=directory / listed.file,
                found="no entry",
                expected=f"{listed.rows} trajectories, as {MANIFEST} says",
                setting=f"restore the shard, or remove its line from {MANIFEST}",
            )
    return tuple(shards.values())


def check_shard(path: Path, info: ShardInfo | None, verify_checksum: bool) -> None:
    """Compare a shard file with its entry: size always, contents on request.

    Raises:
        RolloutError: absent, of another size (torn), or of another checksum (damaged).
    """
    if not path.is_file():
        raise RolloutError("shard file is missing", file=path, found="no such file", expected="an Arrow IPC file")
    if info is None:
        return
    size = path.stat().st_size
    if size != info.bytes:
        raise RolloutError("shard is torn", file=path, field="bytes", found=size, expected=info.bytes)
    if verify_checksum and (found := _checksum(path)) != info.xxh3_128:
        raise RolloutError("shard fails its checksum", file=path, field="xxh3_128", found=found, expected=info.xxh3_128)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
