"""Refused rows, kept in side shards with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts._decode import list_lengths
from megatron_rl.rollouts._shard_files import commit_shard
from megatron_rl.rollouts.store import open_shard


def quarantine(refused: Iterable[RolloutError], directory: str | Path | None) -> tuple[str, ...]:
    """Copy each refused row, unchanged, to a side shard; one side shard for each source shard.

    Added columns: `source_file`, `source_row`, `reason`. The name is derived from the source's path and the rows,
    so repeating a validation replaces the side shard, and ranks that check disjoint rows of one shard write different
    ones.

    Args:
        directory: None means `quarantine/` beside each source.
    """
    ordered = sorted(refused, key=lambda error: (str(error.file), error.row))
    return tuple(
        _copy_rows(Path(file), list(errors), directory) for file, errors in groupby(ordered, lambda e: str(e.file))
    )


def _copy_rows(source: Path, errors: Sequence[RolloutError], directory: str | Path | None) -> str:
    rows = [error.row for error in errors]
    _, batches = open_shard(source)
    # One record batch, and so one dictionary: an Arrow file cannot replace a dictionary between batches.
    table = pa.Table.from_batches(batches).take(rows).combine_chunks()
    table = table.append_column("source_file", pa.array([str(source)] * len(rows), pa.string()))
    table = table.append_column("source_row", pa.array(rows, pa.int64()))
    table = table.append_column("reason", pa.array([str(error) for error in errors], pa.string()))
    target = Path(directory) if directory is not None else source.parent / "quarantine"
    name = f"{source.stem}-{xxhash.xxh3_64_hexdigest(f'{source.resolve()} {rows}'.encode())}"
    tokens = int(np.sum([list_lengths(chunk).sum() for chunk in table.column("tokens").chunks]))
    commit_shard(target, name, table, tokens=tokens, replace=True)
    return str(target / f"{name}.arrow")
