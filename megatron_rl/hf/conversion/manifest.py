"""Hashes of everything in a written directory, beside it: `manifest.json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.conversion.output_files import Plan
from megatron_rl.hf.json_files import read_json, write_json

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What was written."""

    fingerprint: str
    """`Plan.fingerprint` of the conversion."""
    source: dict[str, Any]
    """`Source.identity`."""
    tensors: dict[str, dict[str, Any]]
    """Name → file, dtype, shape, xxh3_128 of its bytes."""
    files: dict[str, dict[str, Any]]
    """Every other file → bytes, xxh3_128."""


def make_manifest(plan: Plan, source: dict[str, Any], hashes: dict[str, str], others: Iterable[Path]) -> Manifest:
    """Put a manifest together.

    Args:
        plan: of the conversion.
        source: its identity.
        hashes: name → hash of every tensor.
        others: files without tensors.
    """
    tensors = {
        tensor.name: {
            "file": file.name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "xxh3_128": hashes[tensor.name],
        }
        for file in plan.files
        for tensor in file.tensors
    }
    return Manifest(plan.fingerprint, source, tensors, {path.name: seal(path) for path in others})


def seal(path: Path) -> dict[str, Any]:
    """Size and hash of a small file."""
    data = path.read_bytes()
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it into the directory it describes."""
    write_json(
        directory / MANIFEST,
        {
            "format": _FORMAT,
            "fingerprint": manifest.fingerprint,
            "source": manifest.source,
            "tensors": manifest.tensors,
            "files": manifest.files,
        },
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a written directory.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    path = directory / MANIFEST
    values = read_json(path)
    if values.get("format") != _FORMAT:
        raise CheckpointError(
            "unknown manifest", file=path, field="format", found=values.get("format"), expected=_FORMAT
        )
    try:
        return Manifest(*(values[key] for key in ("fingerprint", "source", "tensors", "files")))
    except KeyError as error:
        raise CheckpointError("broken manifest", file=path, field=error.args[0], found="nothing") from None
