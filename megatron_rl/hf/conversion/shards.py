"""One safetensors file, written as a stream of tensors, and read back against what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.files import make_durable
from megatron_rl.hf.ahead import ahead
from megatron_rl.hf.audit import value_problems
from megatron_rl.hf.conversion.output_files import PlannedFile
from megatron_rl.hf.conversion.sources import Source

_PIECE = 8 << 20
"""Bytes hashed and written in one go: what was hashed is still in the processor's cache when it is written."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they lie in a file."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def tensor_hash(tensor: Tensor) -> str:
    """xxh3_128 of a tensor's bytes, hexadecimal."""
    return xxhash.xxh3_128(tensor_bytes(tensor)).hexdigest()


def write_shard(file: PlannedFile, source: Source, path: Path, tick: Callable[[], None]) -> dict[str, str]:
    """Write one file under a temporary name, make it durable and give it its name.

    Args:
        file: what belongs into it.
        source: where the values are.
        path: of the finished file.
        tick: called after each tensor.

    Returns:
        Name → hash of every tensor.

    Raises:
        CheckpointError: a tensor is non-finite, constant or of another shape (also: not representable in the target's
            dtype), or the file system refused.
    """
    temporary, hashes = path.with_name(path.name + ".tmp"), {}
    try:
        with open(temporary, "wb", buffering=0) as stream:
            _write_all(stream, file.header)
            for name, tensor in ahead(prepared(file, source)):
                hashes[name] = _write_hashed(stream, tensor_bytes(tensor))
                tick()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(
            "a file could not be written",
            file=path,
            found=error.strerror or repr(error),
            expected=f"{file.size / 1e9:.3f} GB of room and permission to write",
            setting="TARGET, or free space and run the same command again: finished files are kept",
        ) from error
    temporary.rename(path)
    make_durable(path.parent)
    source.release()
    return hashes


def prepared(file: PlannedFile, source: Source) -> Iterator[tuple[str, Tensor]]:
    """A file's tensors in order, in the target's dtype, checked."""
    planned = iter(file.tensors)
    for parameter in file.parameters:
        for name, tensor in source.read(parameter):
            wanted = next(planned)
            tensor = tensor.to(wanted.dtype)
            problems = value_problems(name, tensor, wanted.shape, may_be_constant=parameter.may_be_constant)
            if problems:
                raise problems[0].error(source.directory)
            yield name, tensor


def read_hashes(path: Path, file: PlannedFile) -> dict[str, str]:
    """Hashes of the tensors of a written file, read in one sequential pass.

    Raises:
        CheckpointError: the file is absent, torn, or does not start with the planned header.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb", buffering=0) as stream:
            header = file.header
            if size != file.size or stream.read(len(header)) != header:
                raise CheckpointError(
                    "a file is torn or not what was planned",
                    file=path,
                    found=f"{size} bytes" if size != file.size else "another header",
                    expected=f"{file.size} bytes and the planned tensors",
                    setting="run the same conversion again: it replaces the file",
                )
            return {tensor.name: _read_hash(stream, tensor.stop - tensor.start) for tensor in file.tensors}
    except OSError as error:
        raise CheckpointError("a file cannot be read", file=path, found=error.strerror, expected="a shard") from error


def _write_hashed(stream: BinaryIO, data: memoryview) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        digest.update(piece)
        _write_all(stream, piece)
    return digest.hexdigest()


def _write_all(stream: BinaryIO, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _read_hash(stream: BinaryIO, size: int) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(min(size, _PIECE))
    while size:
        count = stream.readinto(memoryview(buffer)[: min(size, _PIECE)])
        if not count:
            raise OSError(0, "the file ended early")
        digest.update(memoryview(buffer)[:count])
        size -= count
    return digest.hexdigest()
