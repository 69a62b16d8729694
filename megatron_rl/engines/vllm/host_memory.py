"""Sleep on a CPU, where vLLM has no sleep mode: the memory of tensors is released and allocated again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


class ReleasableMemory:
    """Releases the memory of tensors, which keep their shapes and views but must not be used before `restore`."""

    def __init__(self) -> None:
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Release the memory of these tensors; their contents are lost.

        Args:
            tensors: several may share memory; those released before are skipped.
        """
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if size := storage.nbytes():
                self._sizes.append((storage, size))
                storage.resize_(0)
        release_free_memory()

    def restore(self) -> None:
        """Allocate memory of the same size for all of them, filled with zeros.

        Zeros, because attention multiplies masked values by 0, and NaN times 0 is NaN.
        """
        while self._sizes:
            storage, size = self._sizes.pop()
            storage.resize_(size).fill_(0)


def release_free_memory() -> None:
    """Return freed memory to the system: glibc keeps small blocks. No effect with other C libraries."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
