"""Tensors of a distributed checkpoint (`torch_dist` format), read region by region: no model, no process group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_rl.errors import CheckpointError


class StoredTensors:
    """The global tensors of one checkpoint directory (`backend.checkpoint.save_states`).

    A tensor lies in one or more chunks; only chunks that meet a wanted region are read, one at a time.

    Raises:
        CheckpointError: the directory's metadata cannot be read; from `read`, a chunk is missing or torn.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            metadata = FileSystemReader(self.directory).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
            raise CheckpointError(
                "no distributed checkpoint",
                file=self.directory,
                found=repr(error),
                expected="the states of a run's checkpoint",
            ) from error
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Key without the prefix → global shape, of all tensors under `prefix`."""
        cut = len(prefix)
        return {key[cut:]: tuple(entry.size) for key, entry in self._tensors.items() if key.startswith(prefix)}

    def prefixes(self) -> list[str]:
        """The `<role>.<state>.` that occur, sorted."""
        return sorted({".".join(key.split(".")[:2]) + "." for key in self._tensors})

    def read(self, key: str, region: Sequence[slice]) -> Tensor:
        """Part of a tensor, float32, in memory of its own. `region` has one slice per dimension."""
        wanted = [(part.start, part.stop) for part in region]
        out = torch.empty([stop - start for start, stop in wanted])
        filled = 0
        for chunk in self._tensors[key].chunks:
            span = [
                (max(a, offset), min(b, offset + size))
                for (a, b), offset, size in zip(wanted, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in span):
                continue
            source = tuple(slice(a - o, b - o) for (a, b), o in zip(span, chunk.offsets, strict=True))
            target = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(span, wanted, strict=True))
            out[target] = self._chunk(key, chunk.offsets)[source]
            filled += prod(stop - start for start, stop in span)
        if filled != out.numel():
            raise CheckpointError(
                "a stored tensor has holes",
                file=self.directory,
                field=key,
                found=f"{filled} of {out.numel()} entries",
                expected="chunks that cover it",
            )
        return out

    def _chunk(self, key: str, offsets: torch.Size) -> Tensor:
        place = self._storage[MetadataIndex(key, offsets)]
        path = self.directory / place.relative_path
        try:
            with open(path, "rb") as stream:
                stream.seek(place.offset)
                data = stream.read(place.length)
            if len(data) < place.length:
                raise EOFError(f"the file ends after {len(data)} of them")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                "a file of the checkpoint is missing or torn",
                file=path,
                field=key,
                found=repr(error),
                expected=f"{place.length} bytes at {place.offset}",
            ) from error
