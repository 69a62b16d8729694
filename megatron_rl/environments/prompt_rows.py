"""Rows of a prompt dataset, from the formats people keep them in.

| path | read as |
|---|---|
| `*.jsonl` | one JSON object a line; blank lines are passed over, a row's number is its line's, from 0 |
| `*.parquet` | a Parquet file |
| `*.arrow` | an Arrow IPC file or stream |
| a directory with `state.json` | what `datasets.Dataset.save_to_disk` writes; read without that library |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from megatron_rl.errors import ConfigError

SETTING = "rollout.environment_options"


class Row(NamedTuple):
    """One row and where it stands."""

    file: Path
    number: int
    """0-based, within the file."""
    fields: dict[str, Any]

    def fault(self, what: str, field: str | None, found: Any, expected: Any) -> ConfigError:
        """The error of a bad field of this row."""
        return ConfigError(
            what, file=self.file, row=self.number, field=field, found=found, expected=expected, setting=SETTING
        )


def read_rows(path: str | Path) -> list[Row]:
    """Read a whole dataset into memory, in its own order.

    Raises:
        ConfigError: nothing there, an unknown format, an unreadable file or line, or no rows at all.
    """
    path = Path(path)
    files = _hf_files(path) if path.is_dir() else [path]
    rows = [row for file in files for row in _read_file(file)]
    if not rows:
        raise ConfigError("a prompt dataset without rows", file=path, setting=f"{SETTING}.path")
    return rows


def _hf_files(directory: Path) -> list[Path]:
    state = directory / "state.json"
    if not state.is_file():
        splits = sorted(child.name for child in directory.iterdir() if (child / "state.json").is_file())
        raise ConfigError(
            "not a saved dataset", file=directory, found=f"splits {splits}" if splits else "no state.json",
            expected="the directory of one split", setting=f"{SETTING}.path",
        )  # fmt: skip
    try:
        return [directory / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("unreadable state of a saved dataset", file=state, found=repr(error)) from error


def _read_file(file: Path) -> Iterator[Row]:
    readers = {".jsonl": _json_lines, ".parquet": _parquet, ".arrow": _arrow}
    if file.suffix not in readers:
        raise ConfigError(
            "unknown format of a prompt dataset", file=file, expected=f"{sorted(readers)} or a saved dataset",
            setting=f"{SETTING}.path",
        )  # fmt: skip
    try:
        for number, fields in readers[file.suffix](file):
            yield Row(file, number, fields)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError("unreadable prompt dataset", file=file, found=error, setting=f"{SETTING}.path") from error


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                yield number, _json_object(file, number, line)


def _json_object(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            "a line is not JSON", file=file, row=number, found=error, expected="one object a line"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            "a line is not a JSON object", file=file, row=number, found=type(fields).__name__, expected="an object"
        )
    return fields


def _parquet(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    return enumerate(pyarrow.parquet.read_table(file).to_pylist())


def _arrow(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with pa.memory_map(str(file)) as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            table = pyarrow.ipc.open_file(source).read_all()
        return enumerate(table.to_pylist())
