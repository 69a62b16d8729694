"""The plan of a conversion, made before anything is read: files of bounded size, each with its header."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import xxhash

from megatron_rl.hf.conversion.sources import Parameter, Source
from megatron_rl.hf.reader import SINGLE_FILE
from megatron_rl.hf.shard_file import file_header, header_entry


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the end of the header."""
    stop: int


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file: everything but the values of its tensors is known."""

    name: str
    parameters: tuple[Parameter, ...]
    tensors: tuple[PlannedTensor, ...]
    """In the order of `parameters`, without gaps."""

    @property
    def header(self) -> bytes:
        """See `file_header`."""
        return file_header(header_entry(t.name, t.dtype, t.shape, t.start, t.stop) for t in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.tensors[-1].stop


@dataclass(frozen=True)
class Plan:
    """A whole conversion."""

    files: tuple[PlannedFile, ...]
    fingerprint: str
    """Of source, options and layout: equal exactly where a finished file of one conversion serves another."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most bytes."""
        by_dtype: dict[torch.dtype, int] = {}
        for tensor in self.tensors():
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.stop - tensor.start
        return max(by_dtype, key=by_dtype.__getitem__)

    def tensors(self) -> Iterator[PlannedTensor]:
        """All tensors of all files."""
        for file in self.files:
            yield from file.tensors


def make_plan(source: Source, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 2**30) -> Plan:
    """Cut a model into files. The same source and options give the same plan in every process.

    Args:
        source: what is converted.
        dtype: of every tensor but those that keep theirs; None: `source.stored_dtype`, else as stored.
        max_shard_bytes: data bytes of one file; a parameter that has more gets a file of its own.
    """
    dtype = dtype or source.stored_dtype
    groups = list(_fill(_sized(source, dtype), max_shard_bytes))
    files = []
    for i, group in enumerate(groups):
        name = SINGLE_FILE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        # Four-byte tensors first: then each lies at a multiple of its own element size.
        group.sort(key=lambda entry: -entry[1][0].itemsize)
        files.append(PlannedFile(name, tuple(p for p, _ in group), tuple(_place(group))))
    return Plan(tuple(files), _fingerprint(source, files))


_Sized = tuple[Parameter, tuple[torch.dtype, ...]]


def _sized(source: Source, dtype: torch.dtype | None) -> Iterator[_Sized]:
    for parameter in source.parameters():
        wanted = None if parameter.keeps_dtype else dtype
        yield parameter, tuple(wanted or source.dtype(tensor) for tensor in parameter.tensors)


def _fill(entries: Iterable[_Sized], limit: int) -> Iterator[list[_Sized]]:
    group: list[_Sized] = []
    held = 0
    for parameter, dtypes in entries:
        size = sum(prod(t.shape) * d.itemsize for t, d in zip(parameter.tensors, dtypes, strict=True))
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append((parameter, dtypes))
        held += size
    yield group


def _place(group: list[_Sized]) -> Iterator[PlannedTensor]:
    start = 0
    for parameter, dtypes in group:
        for tensor, dtype in zip(parameter.tensors, dtypes, strict=True):
            stop = start + prod(tensor.shape) * dtype.itemsize
            yield PlannedTensor(tensor.name, dtype, tensor.shape, start, stop)
            start = stop


def _fingerprint(source: Source, files: Iterable[PlannedFile]) -> str:
    digest = xxhash.xxh3_128(json.dumps(source.identity(), sort_keys=True).encode())
    for file in files:
        digest.update(file.name.encode() + file.header)
    return digest.hexdigest()
