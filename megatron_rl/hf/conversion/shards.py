"""One safetensors file, written as a stream of tensors, and read back against what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import xxhash
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.files import make_durable
from megatron_rl.hf.ahead import ahead
from megatron_rl.hf.audit import value_problems
from megatron_rl.hf.conversion.output_files import PlannedFile
from megatron_rl.hf.conversion.sources import Source
from megatron_rl.hf.shard_file import LENGTH_BYTES, ShardFile, tensor_bytes

_PIECE = 8 << 20
"""Bytes read and hashed in one go."""


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
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        hashes = _write(file, source, temporary, tick)
        make_durable(temporary)
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


def _write(file: PlannedFile, source: Source, path: Path, tick: Callable[[], None]) -> dict[str, str]:
    shard, hashes = ShardFile(path, len(file.header) - LENGTH_BYTES), {}
    try:
        for name, tensor in ahead(prepared(file, source)):
            digest = xxhash.xxh3_128()
            # In the plan's order, which aligns tensors.
            shard.append(name, tensor.dtype, tensor.shape, tensor_bytes(tensor), digest)
            hashes[name] = digest.hexdigest()
            tick()
        shard.close()
    except BaseException:
        shard.abandon()
        raise
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


def _read_hash(stream: FileIO, size: int) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(min(size, _PIECE))
    while size:
        count = stream.readinto(memoryview(buffer)[: min(size, _PIECE)])
        if not count:
            raise OSError(0, "the file ended early")
        digest.update(memoryview(buffer)[:count])
        size -= count
    return digest.hexdigest()
