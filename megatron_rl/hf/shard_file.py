"""One safetensors file that grows tensor by tensor: every byte is written once, straight from the tensor.

Invariants:

* Room for the header is left free and the header written last, padded with spaces, as the format allows.
* Every tensor begins at a multiple of its item size: those whose own size is not a multiple of 8 are held back and
  written last, large items before small ones, because the format has no gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import CheckpointError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8
_LONGEST_OFFSET = 10**15

Piece = tuple[int, str]
"""So many bytes of a file, and their xxh3-64 in hexadecimal. A file's pieces follow each other without gaps."""


@dataclass(frozen=True)
class _Held:
    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    data: bytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they lie in a file; a view of it where it is contiguous and in CPU memory."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def header_room(shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes that the header of a file with these tensors takes at most."""
    longest = max(_NAMES.values(), key=len)
    entries = (_entry(name, longest, shape, _LONGEST_OFFSET, _LONGEST_OFFSET) for name, shape in shapes.items())
    size = len(_header(entries))
    return size + -size % _ALIGNMENT


class ShardFile:
    """A file under construction.

    Args:
        path: does not exist yet.
        room: see `header_room`, of all tensors that may come.
    """

    def __init__(self, path: Path, room: int) -> None:
        self.path, self._room = path, room
        self.size = 0
        """Bytes of tensors so far."""
        self.names: list[str] = []
        """Tensors in the order of the file."""
        self._entries: list[str] = []
        self._sizes: list[int] = []
        self._held: list[_Held] = []
        self._end = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def add(self, name: str, tensor: Tensor, data: memoryview) -> None:
        """Append a tensor, whose `tensor_bytes` are `data`; its memory may be reused at once.

        Raises:
            CheckpointError: a dtype that `reader.SafetensorsReader` does not read.
        """
        if tensor.dtype not in _NAMES:
            expected = " or ".join(map(str, _NAMES))
            raise CheckpointError(
                "unsupported dtype", file=self.path, field=name, found=tensor.dtype, expected=expected
            )
        self.size += len(data)
        if len(data) % _ALIGNMENT:
            self._held.append(_Held(name, tensor.dtype, tensor.shape, bytes(data)))
        else:
            self._append(name, tensor.dtype, tensor.shape, data)

    def close(self, digests: Mapping[str, str]) -> list[Piece]:
        """Write what was held back and the header.

        Args:
            digests: tensor name → xxh3-64 of its bytes.

        Returns:
            The pieces of the file: its header and each tensor.
        """
        for late in sorted(self._held, key=lambda held: -held.dtype.itemsize):
            self._append(late.name, late.dtype, late.shape, late.data)
        header = _header(self._entries).ljust(self._room)
        start = self._room.to_bytes(8, "little") + header
        self._write(start, 0)
        os.close(self._file)
        tensors = [(size, digests[name]) for name, size in zip(self.names, self._sizes, strict=True)]
        return [(len(start), xxhash.xxh3_64_hexdigest(start)), *tensors]

    def abandon(self) -> None:
        """Let go of an unfinished file."""
        os.close(self._file)

    def _append(self, name: str, dtype: torch.dtype, shape: Sequence[int], data: memoryview | bytes) -> None:
        self._entries.append(_entry(name, _NAMES[dtype], shape, self._end, self._end + len(data)))
        self.names.append(name)
        self._sizes.append(len(data))
        self._write(data, 8 + self._room + self._end)
        self._end += len(data)

    def _write(self, data: memoryview | bytes, place: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, place)
            view, place = view[written:], place + written


def _entry(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> str:
    values = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    return f"{json.dumps(name)}:{json.dumps(values, separators=(',', ':'))}"


def _header(entries: Iterable[str]) -> bytes:
    return ("{" + ",".join(['"__metadata__":{"format":"pt"}', *entries]) + "}").encode()
