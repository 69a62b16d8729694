"""Sleep on a CPU, where vLLM has none: memory of tensors goes back to the system and comes again, at its own size."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


class ReleasableMemory:
    """Tensors whose memory was given back. They stay as they are, views and all, but must not be touched meanwhile."""

    def __init__(self) -> None:
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """What is in them is lost. Tensors that share memory may all be named; those given back before are skipped."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if size := storage.nbytes():
                self._sizes.append((storage, size))
                storage.resize_(0)
        release_free_memory()

    def restore(self) -> None:
        """Fresh memory for all of them, zero: attention multiplies what it masks, and NaN times zero is NaN."""
        while self._sizes:
            storage, size = self._sizes.pop()
            storage.resize_(size).fill_(0)


def release_free_memory() -> None:
    """glibc keeps blocks that were freed, unless they were large; other C libraries have no such call."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def resident_bytes() -> int:
    """Of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
