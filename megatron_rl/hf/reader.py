"""Tensors of an HF checkpoint directory, read slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.json_files import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsReader:
    """One checkpoint directory: a single safetensors file, or several and an index.

    Files are mapped on first use and stay mapped; nothing is read until `read`.

    Raises:
        CheckpointError: no weights, both layouts at once, a broken index, an unreadable or truncated file, or a tensor
            that is missing, quantised or non-finite. `file` and `field` name the file and the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open_files: dict[str, Any] = {}
        self._where = self._locate()

    def _locate(self) -> dict[str, str]:
        index, single = self.path / INDEX_FILE, self.path / SINGLE_FILE
        if index.exists() and single.exists():
            raise CheckpointError(
                "two sets of weights in one directory",
                file=self.path,
                found=f"{INDEX_FILE} and {SINGLE_FILE}",
                expected="one",
            )
        if single.exists():
            return dict.fromkeys(self._handle(SINGLE_FILE, None).keys(), SINGLE_FILE)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                "broken index", file=index, field="weight_map", found="nothing", expected="name → file"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError("broken index", file=index, field=name, found=repr(file), expected="a file name")
        return weight_map

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        """Names of all tensors the checkpoint declares."""
        return list(self._where)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        if name not in self._where:
            raise CheckpointError(
                "a tensor is missing", file=self.path, field=name, found="nothing", expected="a tensor in the index"
            )
        return self.path / self._where[name]

    def headers(self) -> dict[str, tuple[str, ...]]:
        """Name → files whose header holds it, over all files of the index. The index itself may say otherwise."""
        holders: dict[str, tuple[str, ...]] = {}
        for file in sorted(set(self._where.values())):
            names = self._handle(file, None).keys()
            for name in names:
                holders[name] = (*holders.get(name, ()), file)
        return holders

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype: float32, bfloat16 or float16; anything else is refused as quantised."""
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise CheckpointError(
                "unsupported tensor dtype", file=self.file(name), field=name, found=found, expected=" or ".join(_DTYPES)
            )
        return _DTYPES[found]

    def read(self, name: str, slices: Sequence[slice] = (), *, check_finite: bool = True) -> Tensor:
        """Part of a tensor, one slice (start and stop, no step) per leading dimension; () is all of it.

        The file is memory-mapped, so only pages under the slices are touched: row ranges cost their own bytes, column
        ranges of narrow rows up to the whole. The result may be a view of the mapping: copy it, never write to it.
        """
        shape = self.shape(name)
        self.dtype(name)
        self._check_inside(name, slices, shape)
        tensor = self._slice(name)[tuple(slices) or ...]
        if check_finite:
            self._check_finite(name, tensor)
        return tensor

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if not all_finite(tensor):
            raise CheckpointError(
                "non-finite weights",
                file=self.file(name),
                field=name,
                found=f"{count_non_finite(tensor)} NaN or inf",
                expected="finite values",
            )

    def _check_inside(self, name: str, slices: Sequence[slice], shape: tuple[int, ...]) -> None:
        for part, size in zip(slices, shape, strict=False):
            if not 0 <= part.start <= part.stop <= size:
                raise CheckpointError(
                    "a slice lies outside its tensor",
                    file=self.file(name),
                    field=name,
                    found=part,
                    expected=f"[0, {size}]",
                )

    def _slice(self, name: str) -> Any:
        file = self.file(name)
        try:
            return self._handle(file.name, name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                "a tensor is missing from its file",
                file=file,
                field=name,
                found=str(error),
                expected="what the index says",
            ) from error

    def _handle(self, file: str, name: str | None) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(str(self.path / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    "a weights file is missing, truncated or not safetensors",
                    file=self.path / file,
                    field=name,
                    found=str(error),
                    expected="a complete file",
                ) from error
        return self._open_files[file]


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest entry, each NaN where any entry is NaN; zeros of a tensor without entries.

    One pass without temporaries: conversion reads every byte of a model through it.
    """
    if not tensor.numel():
        nothing = tensor.new_zeros(())
        return nothing, nothing
    low, high = tensor.aminmax()
    return low, high


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. An infinity or a NaN anywhere shows in one of the extremes."""
    low, high = extremes(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def count_non_finite(tensor: Tensor) -> int:
    """How many entries are NaN or infinite. Slow: for the message of an error."""
    return int((~torch.isfinite(tensor)).sum())
