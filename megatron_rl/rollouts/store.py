"""Arrow IPC shards of recorded rollouts: atomic, durable writes and memory-mapped reads.

Invariants:

* A shard is visible whole or not at all, whatever happens to its writer; earlier shards stay readable.
* Shards are immutable. Writers need no lock: each touches only files of its own name.
* Reading maps files. Columns of a single shard are views of it; columns of several are concatenated; routes are views
  in either case, so their bytes are read only when sliced (verifying checksums reads whole files; it is optional).
* What was written comes back bit for bit, with null and empty kept apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts._decode import decode
from megatron_rl.rollouts._encode import encode
from megatron_rl.rollouts._format import TOKEN_COLUMNS, decode_header
from megatron_rl.rollouts._mapping import map_file, prefetch_columns
from megatron_rl.rollouts._shard_files import (
    SUFFIX,
    ShardInfo,
    check_shard,
    commit_shard,
    is_committed,
    read_entry,
    read_manifest,
    shard_paths,
)
from megatron_rl.rollouts.schema import RolloutBatch, RolloutHeader, Trajectory

__all__ = [
    "ShardInfo",
    "is_committed",
    "read_batch",
    "read_manifest",
    "select_rows",
    "shard_paths",
    "trajectory_at",
    "write_shard",
]

Source = str | os.PathLike | Sequence[str | os.PathLike]


def write_shard(
    directory: str | os.PathLike, header: RolloutHeader, trajectories: Sequence[Trajectory], *, name: str | None = None
) -> ShardInfo:
    """Write one committed shard `name`.arrow.

    Shards are read in the order of their names; give every writer names of its own (step and rank, say) where that
    order must be reproducible. The default is a random name.

    Raises:
        RolloutError, RouteError: an array of another dtype or shape than `schema.Trajectory` says, a name in use, or a
            file system that refuses the write. Nothing new is visible then.
    """
    directory, name = Path(directory), name or f"shard-{uuid4().hex}"
    table = encode(header, trajectories, directory / (name + SUFFIX))
    return commit_shard(directory, name, table, tokens=sum(len(trajectory.tokens) for trajectory in trajectories))


def read_batch(
    source: Source, *, verify_checksums: bool = True, refused: list[RolloutError] | None = None
) -> RolloutBatch:
    """Map committed shards as one batch.

    Args:
        source: a directory (its manifest's shards), one shard file, or several. Files named one by one need no manifest
            entry; where they have one, it is checked.
        verify_checksums: read every file once and compare with its entry. Enough on one rank; the others pass False and
            touch only what they slice. Sizes and Arrow offsets are checked in any case.
        refused: None raises the first structurally damaged row; a list receives one error for each, and they are left
            out (`validate` takes the list as `already_refused`).

    Raises:
        RolloutError: no shard; one missing, torn, failing its checksum, of another format or schema; headers differ.
        RouteError: routes whose size fits neither the layers nor the tokens.
    """
    pieces: list[RolloutBatch] = []
    for path in shard_files(source):
        check_shard(path, read_entry(path), verify_checksums)
        for piece in _read_shard(path, refused):
            if pieces and piece.header != pieces[0].header:
                raise _header_conflict(path, piece.header, pieces[0].header)
            pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def shard_files(source: Source) -> list[Path]:
    """Shard files a source stands for, at least one.

    Raises:
        RolloutError: a directory without committed shards, or an empty list.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        files = [path / shard.file for shard in read_manifest(path)] if path.is_dir() else [path]
    else:
        files = [Path(path) for path in source]
    if not files:
        raise RolloutError("no committed shard", file=source, found="none", expected="at least one shard and its entry")
    return files


def open_shard(path: Path) -> tuple[RolloutHeader, list[pa.RecordBatch]]:
    """Map one shard file: its header and its record batches, none of whose values has been read yet.

    Raises:
        RolloutError: torn, of another format or schema, or with offsets that leave the file.
    """
    try:
        reader = pa.ipc.open_file(map_file(path))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RolloutError("shard is torn", file=path, found=error, expected="a whole Arrow IPC file") from error
    header = decode_header(reader.schema, str(path))
    for batch in batches:
        prefetch_columns(batch, but="routes")
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise RolloutError("shard is damaged", file=path, found=error, expected="valid Arrow offsets") from error
    return header, batches or [pa.RecordBatch.from_pylist([], schema=reader.schema)]


def _read_shard(path: Path, refused: list[RolloutError] | None) -> list[RolloutBatch]:
    header, batches = open_shard(path)
    first_rows = np.cumsum([0] + [batch.num_rows for batch in batches]).tolist()
    return [
        decode(batch, header, str(path), first, refused) for batch, first in zip(batches, first_rows[:-1], strict=True)
    ]


def _header_conflict(path: Path, found: RolloutHeader, expected: RolloutHeader) -> RolloutError:
    name = next(f.name for f in fields(RolloutHeader) if getattr(found, f.name) != getattr(expected, f.name))
    return RolloutError(
        "shards read together differ in their header",
        file=path,
        field=name,
        found=getattr(found, name),
        expected=f"{getattr(expected, name)}, as in the first shard",
    )


_RAGGED = {
    "offsets": tuple(TOKEN_COLUMNS),
    "turn_offsets": ("turn_rewards",),
    "boundary_offsets": ("boundary_tokens",),
}
_PER_ROW = ("reward", "terminated", "truncated", "boundary_known")


def _frozen(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


def _tuple_fields() -> list[str]:
    arrays = {*_RAGGED, *(name for names in _RAGGED.values() for name in names), *_PER_ROW, "header"}
    return [field.name for field in fields(RolloutBatch) if field.name not in arrays]


def _concatenate(pieces: Sequence[RolloutBatch]) -> RolloutBatch:
    def joined(name: str) -> np.ndarray:
        return _frozen(np.concatenate([getattr(piece, name) for piece in pieces]))

    columns: dict = {name: joined(name) for names in _RAGGED.values() for name in names}
    columns |= {name: joined(name) for name in _PER_ROW}
    for name in _RAGGED:
        lengths = [np.diff(getattr(piece, name)) for piece in pieces]
        columns[name] = _frozen(np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]))
    columns |= {name: sum((getattr(piece, name) for piece in pieces), ()) for name in _tuple_fields()}
    return replace(pieces[0], **columns)


def select_rows(batch: RolloutBatch, rows: Sequence[int] | np.ndarray) -> RolloutBatch:
    """Trajectories `rows` (int `[B']`, any order) as a batch, routes still views; the batch itself if those are all."""
    rows = np.asarray(rows, dtype=np.int64)
    if np.array_equal(rows, np.arange(len(batch))):
        return batch
    columns: dict = {name: _frozen(getattr(batch, name)[rows]) for name in _PER_ROW}
    for name, ragged in _RAGGED.items():
        offsets = getattr(batch, name)
        lengths = np.diff(offsets)[rows]
        columns[name] = _frozen(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        index = np.repeat(offsets[rows] - columns[name][:-1], lengths) + np.arange(columns[name][-1])
        columns |= {column: _frozen(getattr(batch, column)[index]) for column in ragged}
    for name in _tuple_fields():
        values = getattr(batch, name)
        columns[name] = tuple(values[row] for row in rows) if values else values
    return replace(batch, **columns)


def trajectory_at(batch: RolloutBatch, row: int) -> Trajectory:
    """Trajectory `row` of a batch as the record that was written, arrays being views."""
    tokens = slice(batch.offsets[row], batch.offsets[row + 1])
    boundary = batch.boundary_tokens[batch.boundary_offsets[row] : batch.boundary_offsets[row + 1]]
    return Trajectory(
        trajectory_id=batch.trajectory_ids[row],
        prompt_id=batch.prompt_ids[row],
        group_id=batch.group_ids[row],
        **{name: getattr(batch, name)[tokens] for name in TOKEN_COLUMNS},
        turn_rewards=batch.turn_rewards[batch.turn_offsets[row] : batch.turn_offsets[row + 1]],
        reward=float(batch.reward[row]),
        outcome=batch.outcome[row],
        terminated=bool(batch.terminated[row]),
        truncated=bool(batch.truncated[row]),
        boundary_tokens=boundary if batch.boundary_known[row] else None,
        reward_vector=batch.reward_vectors[row] if batch.reward_vectors else None,
        routes=batch.routes[row],
        metadata=batch.metadata[row] if batch.metadata else {},
    )
