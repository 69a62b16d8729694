"""Memory-mapped shards whose routes are read from storage by exactly the bytes asked for.

Two defaults would read whole shards on every rank: `pyarrow.memory_map` advises the kernel to page in a record batch
when it is opened, and a page fault reads ahead by the device's setting (megabytes on network and striped storage). So
files are mapped without Arrow, read-ahead is off, and columns and route slices are asked for in one request each.
All of it is advice: where a kernel ignores it, only speed differs.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pyarrow as pa

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path) -> pa.Buffer:
    """Map a file read-only, without read-ahead; the mapping lives as long as the buffer and all that is cut from it."""
    with open(path, "rb") as stream:
        buffer = pa.py_buffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    _advise(buffer.address, buffer.size, mmap.MADV_RANDOM)
    return buffer


def prefetch_columns(batch: pa.RecordBatch, but: str) -> None:
    """Start reading every column of a mapped record batch except one."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for buffer in column.buffers() if name != but else ():
            if buffer is not None:
                _advise(buffer.address, buffer.size, mmap.MADV_WILLNEED)


def prefetch(values: np.ndarray) -> None:
    """Start reading a view of a mapped file: one request for each contiguous stretch, nothing beside it."""
    if values.flags.c_contiguous:
        _advise(values.ctypes.data, values.nbytes, mmap.MADV_WILLNEED)
    else:
        for part in values:
            prefetch(part)


def _advise(address: int, size: int, advice: int) -> None:
    if size:
        start = address - address % mmap.PAGESIZE
        _madvise(start, address + size - start, advice)
