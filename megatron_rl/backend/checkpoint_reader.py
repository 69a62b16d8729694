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
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_rl.errors import CheckpointError

METADATA = ".metadata"
_KNOWN = {
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("collections", "OrderedDict"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), (filesystem.__name__, "_StorageInfo"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's metadata and no others: a pickle can name any function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        known = getattr(dcp, name, None) if module == dcp.__name__ else None
        if isinstance(known, type) and known.__module__ == module:
            return known
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


def read_metadata(directory: str | Path) -> Metadata:
    """What a distributed checkpoint says of its tensors and files; nothing it names is called.

    Raises:
        CheckpointError: there is none, or it is damaged, or holds something else.
    """
    try:
        with (Path(directory) / METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__}")
    except Exception as error:  # A damaged pickle raises almost anything.
        raise CheckpointError(
            "no distributed checkpoint",
            file=directory,
            found=repr(error),
            expected="the states of a run's checkpoint",
        ) from error
    return metadata


class StoredTensors:
    """The global tensors of one checkpoint directory (`backend.checkpoint.save_states`).

    A tensor lies in one or more chunks; only chunks that meet a wanted region are read, one at a time.

    Raises:
        CheckpointError: the directory's metadata cannot be read; from `read`, a chunk is missing or torn.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        metadata = read_metadata(self.directory)
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
