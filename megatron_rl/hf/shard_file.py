"""One safetensors file that grows tensor by tensor: every byte is written once, straight from the tensor.

Invariants:

* Room for the header is left free and the header written last, padded with spaces, as the format allows.
* The format has no gaps, and every tensor must begin at a multiple of its item size. `ShardFile.append` leaves that to
  its caller; `ShardFile.add` holds tensors back whose size is not a multiple of 8, and they are written last, large
  items before small ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import CheckpointError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8
LENGTH_BYTES = 8
"""Of the number before the header: how long it is, little endian."""
_LONGEST_OFFSET = 10**15
_PIECE = 8 << 20
"""Bytes hashed and written in one go: what was hashed is still in the processor's cache when it is written."""

Piece = tuple[int, str]
"""So many bytes of a file, and their xxh3-64 in hexadecimal. A file's pieces follow each other without gaps."""


class Digest(Protocol):
    """A hash under construction, as `xxhash` has them."""

    def update(self, data: memoryview, /) -> None:
        """Hash more bytes."""
        ...


@dataclass(frozen=True)
class _Held:
    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    data: bytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they lie in a file; a view of it where it is contiguous and in CPU memory."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def header_room(shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes that the header of a file with these tensors takes at most."""
    longest = max(_NAMES, key=lambda dtype: len(_NAMES[dtype]))
    entries = (header_entry(name, longest, shape, _LONGEST_OFFSET, _LONGEST_OFFSET) for name, shape in shapes.items())
    return len(file_header(entries)) - LENGTH_BYTES


def header_entry(name: str, dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> str:
    """A tensor's line of the header: its bytes are [start, stop), counted from the end of the header."""
    values = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    return f"{json.dumps(name)}:{json.dumps(values, separators=(',', ':'))}"


def file_header(entries: Iterable[str], room: int = 0) -> bytes:
    """How a file begins: length (8 bytes, little endian) and JSON, padded with spaces.

    Args:
        entries: of `header_entry`, in the order of the file.
        room: bytes of the JSON with its padding; 0: up to the next multiple of 8, which aligns the data.
    """
    text = ("{" + ",".join(['"__metadata__":{"format":"pt"}', *entries]) + "}").encode()
    room = room or len(text) + -len(text) % _ALIGNMENT
    return room.to_bytes(LENGTH_BYTES, "little") + text.ljust(room)


class ShardFile:
    """A file under construction.

    Args:
        path: does not exist yet.
        room: see `header_room`, of all tensors that may come; or of the header that is known to come.
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
            self.append(name, tensor.dtype, tensor.shape, data)

    def append(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        data: memoryview | bytes,
        digest: Digest | None = None,
    ) -> None:
        """Append a tensor just behind the one before. `digest` hashes its bytes as they are written."""
        self._entries.append(header_entry(name, dtype, shape, self._end, self._end + len(data)))
        self.names.append(name)
        self._sizes.append(len(data))
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            if digest is not None:
                digest.update(piece)
            self._write(piece, LENGTH_BYTES + self._room + self._end + start)
        self._end += len(view)

    def close(self) -> bytes:
        """Write what was held back and the header. Returns the header, as `file_header` gives it."""
        for late in sorted(self._held, key=lambda held: -held.dtype.itemsize):
            self.append(late.name, late.dtype, late.shape, late.data)
        header = file_header(self._entries, self._room)
        self._write(header, 0)
        os.close(self._file)
        return header

    def close_hashed(self, digests: Mapping[str, str]) -> list[Piece]:
        """`close`, and the pieces of the file: its header and each tensor.

        Args:
            digests: tensor name → xxh3-64 of its bytes.
        """
        header = self.close()
        tensors = [(size, digests[name]) for name, size in zip(self.names, self._sizes, strict=True)]
        return [(len(header), xxhash.xxh3_64_hexdigest(header)), *tensors]

    def abandon(self) -> None:
        """Let go of an unfinished file."""
        os.close(self._file)

    def _write(self, data: memoryview | bytes, place: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, place)
            view, place = view[written:], place + written
