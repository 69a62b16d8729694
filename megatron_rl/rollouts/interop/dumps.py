"""Rollouts that other stacks have dumped, into shards; and shards into such dumps.

Formats, all JSON lines (blank lines are skipped):

* ``slime``: a line is `Sample.to_dict()`, or an object whose `samples` lists several. Files ending in ``.pt`` are what
  slime writes itself (`--save-debug-rollout-data`); nothing but tensors, arrays and plain values is unpickled.
* ``vllm``: a line is a response with `return_token_ids`, see `interop.vllm` for what may be added to it.

`import_dumps(export_dump(x)) == x` for every record in which log-probs are 0 where nothing was sampled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_rl.errors import RolloutError
from megatron_rl.files import atomic_file, name_directory, sweep, temporary_name
from megatron_rl.rollouts.interop.record import ImportOptions, Line
from megatron_rl.rollouts.interop.slime import from_sample, to_sample
from megatron_rl.rollouts.interop.vllm import from_response
from megatron_rl.rollouts.schema import Trajectory
from megatron_rl.rollouts.store import ShardInfo, Source, read_batch, trajectory_at, write_shard

__all__ = ["DumpFormat", "ImportOptions", "export_dump", "import_dumps", "read_dump"]

DumpFormat = Literal["auto", "slime", "vllm"]
SHARD_ROWS, SHARD_BYTES = 4096, 256 << 20
"""A shard ends with the record that reaches either; it is held in memory until then."""


def read_dump(
    path: str | os.PathLike,
    options: ImportOptions,
    dump_format: DumpFormat = "auto",
    refused: list[RolloutError] | None = None,
) -> Iterator[Trajectory]:
    """Trajectories of one dump, one record in memory at a time (a ``.pt`` file is read whole).

    Args:
        dump_format: ``auto`` goes by the fields of each line.
        refused: None raises the first fault; a list receives one error for each line or sample left out.

    Raises:
        RolloutError, RouteError: with file and line, field, found and expected.
    """
    path = Path(path)
    for found in _lines(path):
        try:
            if isinstance(found, RolloutError):
                raise found
            yield from list(_parse(found, options, dump_format))
        except RolloutError as error:
            if refused is None:
                raise
            refused.append(error)


def import_dumps(
    files: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    options: ImportOptions,
    dump_format: DumpFormat = "auto",
    refused: list[RolloutError] | None = None,
    *,
    partial: bool = True,
) -> list[ShardInfo]:
    """Write dumps as shards of a new directory, which appears complete or not at all.

    Args:
        out: must not exist, or be empty.
        dump_format, refused: see `read_dump`.
        partial: keep the others if some were refused; False: write nothing then.

    Returns:
        One entry for each shard; a shard holds records of one file. Empty, and `out` is not made, if all records were
        refused, or some and not `partial`.

    Raises:
        RolloutError, RouteError: see `read_dump`; two files of one name; `out` holds something; there are no records.
    """
    out = Path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RolloutError("output exists", file=out, found="something", expected="no such directory", setting="--out")
    stems = [Path(file).stem for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise RolloutError("two dumps of one name", found=stem, expected="names of their own", setting="FILE")
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent, re.escape(out.name))
    temporary = temporary_name(out)
    temporary.mkdir()
    try:
        shards = [shard for file in files for shard in _write(file, temporary, options, dump_format, refused)]
        if refused and not (partial and shards):
            shutil.rmtree(temporary)
            return []
        if not shards:
            raise RolloutError("nothing to import", file=", ".join(map(str, files)), found=0, expected=">= 1 record")
        name_directory(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return shards


def export_dump(source: Source, path: str | os.PathLike) -> int:
    """Write recorded trajectories as slime's samples, one JSON object a line; returns how many.

    Raises:
        RolloutError: the source is unreadable, or holds a number that JSON cannot (infinite, not a number).
    """
    batch = read_batch(source)
    groups: dict[str, int] = {}
    with atomic_file(Path(path)) as stream:
        for row, (file, file_row) in enumerate(batch.sources):
            sample = to_sample(trajectory_at(batch, row), row, groups.setdefault(batch.group_ids[row], len(groups)))
            try:
                stream.write(json.dumps(sample, allow_nan=False).encode() + b"\n")
            except ValueError as error:
                raise RolloutError(
                    "JSON cannot hold this record", file=file, row=file_row, found=error, expected="finite numbers"
                ) from error
    return len(batch)


def _write(
    file: str | os.PathLike,
    directory: Path,
    options: ImportOptions,
    dump_format: DumpFormat,
    refused: list[RolloutError] | None,
) -> Iterator[ShardInfo]:
    trajectories = read_dump(file, options, dump_format, refused)
    for number, shard in enumerate(_chunks(trajectories)):
        yield write_shard(directory, options.header, shard, name=f"{Path(file).stem}-{number:05d}")


def _chunks(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    chunk: list[Trajectory] = []
    held = 0
    for trajectory in trajectories:
        chunk.append(trajectory)
        held += sum(getattr(value, "nbytes", 0) for value in vars(trajectory).values())
        if len(chunk) == SHARD_ROWS or held >= SHARD_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _parse(line: Line, options: ImportOptions, dump_format: DumpFormat) -> Iterable[Trajectory]:
    if dump_format == "auto":
        dump_format = "vllm" if "choices" in line.values else "slime"
        if dump_format == "slime" and "response_length" not in line.values:
            raise line.fault(
                "record of an unknown format", "", sorted(line.values), "response_length (slime) or choices (vllm)",
                "--format",
            )  # fmt: skip
    trajectories = from_response(line, options) if dump_format == "vllm" else [from_sample(line, options)]
    return (_json_metadata(line, trajectory) for trajectory in trajectories)


def _json_metadata(line: Line, trajectory: Trajectory) -> Trajectory:
    try:
        json.dumps(trajectory.metadata)
    except (TypeError, ValueError) as error:
        raise line.fault("metadata is not JSON", "metadata", error, "values JSON can express") from error
    return trajectory


def _lines(path: Path) -> Iterator[Line | RolloutError]:
    """Objects of a dump, or why there is none at a place."""
    try:
        if path.suffix == ".pt":
            yield from _samples(f"{path}:1", _read_pt(path))
            return
        with open(path, "rb") as stream:
            for number, text in enumerate(stream, start=1):
                if text.strip():
                    yield from _objects(f"{path}:{number}", text)
    except OSError as error:
        raise RolloutError(
            "dump is unreadable", file=path, found=error, expected="JSON lines, or slime's .pt"
        ) from error


def _objects(where: str, text: bytes) -> Iterator[Line | RolloutError]:
    try:
        found = json.loads(text)
    except ValueError as error:
        yield RolloutError("line is no JSON", file=where, found=error, expected="one JSON object")
        return
    yield from _samples(where, found)


def _samples(where: str, found: Any) -> Iterator[Line | RolloutError]:
    if isinstance(found, dict) and isinstance(found.get("samples"), list):
        for number, sample in enumerate(found["samples"]):
            if isinstance(sample, dict):
                yield Line(where, sample, f"samples[{number}].")
            else:
                yield RolloutError("sample is no object", file=where, found=type(sample).__name__, expected="an object")
    elif isinstance(found, dict):
        yield Line(where, found)
    else:
        yield RolloutError("line is no object", file=where, found=type(found).__name__, expected="one JSON object")


def _read_pt(path: Path) -> Any:
    import torch

    types = [type(np.dtype(code)) for code in "?bBhHiIlLqQefd"]
    arrays = [np.ndarray, np.dtype, np._core.multiarray._reconstruct, *types]  # type: ignore[attr-defined]
    try:
        with torch.serialization.safe_globals(arrays):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises whatever the bytes lead it to
        raise RolloutError("dump is unreadable", file=path, found=error, expected="slime's rollout data") from error
