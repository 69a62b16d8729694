"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.files import write_text


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file is absent, is not a JSON object, or names a key twice.
    """

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError("a key occurs twice", file=path, field=repeated, found="duplicate", expected="one")
        return table

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_repeats)
    except FileNotFoundError:
        raise CheckpointError(
            "the checkpoint lacks a file", file=path, found="nothing", expected="a JSON file"
        ) from None
    except ValueError as error:
        raise CheckpointError("unreadable JSON", file=path, found=str(error), expected="a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError("unreadable JSON", file=path, found=type(value).__name__, expected="a JSON object")
    return value


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object, atomically. Keys are sorted, so that equal values give equal bytes."""
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
