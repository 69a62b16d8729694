"""Checkpoints with weights in fp8, scaled by block: DeepSeek-V3, and the `-FP8` releases of Qwen3.

A weight W float8_e4m3fn [..., R, C] comes with scales S [..., ⌈R/b⌉, ⌈C/c⌉] under the weight's name + `_scale_inv`;
config.json gives the block b x c. The value of an entry is float32(W[i, j]) · S[i // b, j // c], rounded to float32
(DeepSeek-V3's `inference/kernel.py`). Values are returned in float32: a cast is the only other rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.json_files import read_json
from megatron_rl.hf.reader import SafetensorsReader

SCALE_SUFFIX = "_scale_inv"
_FP8 = "F8_E4M3"


@dataclass(frozen=True)
class FP8Blocks:
    """Entries that share a scale."""

    rows: int
    columns: int


def read_scheme(settings: dict[str, Any], file: Path) -> FP8Blocks | None:
    """The quantisation a config.json declares; None: none.

    Args:
        settings: contents of config.json.
        file: its path, for messages.

    Raises:
        CheckpointError: a quantisation other than fp8 by block (MXFP4 of gpt-oss, AWQ, GPTQ, per-tensor fp8, …).
    """
    found = settings.get("quantization_config")
    if found is None:
        return None
    settings = found if isinstance(found, dict) else {}
    block: Any = settings.get("weight_block_size")
    by_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if settings.get("quant_method") != "fp8" or settings.get("fmt", "e4m3") != "e4m3" or not by_block:
        raise CheckpointError(
            "unsupported quantisation",
            file=file,
            field="quantization_config",
            found=found,
            expected="quant_method fp8, fmt e4m3, weight_block_size [rows, columns]; or no quantisation",
            setting="a dequantised checkpoint: load it with transformers' own dequantize=True and save_pretrained",
        )
    return FP8Blocks(*block)


def open_checkpoint(path: str | Path) -> SafetensorsReader:
    """The reader of a checkpoint directory, which dequantises where config.json says so.

    Raises:
        CheckpointError: see `SafetensorsReader` and `read_scheme`.
    """
    config = Path(path) / "config.json"
    blocks = read_scheme(read_json(config), config)
    return SafetensorsReader(path) if blocks is None else FP8Reader(path, blocks)


class FP8Reader(SafetensorsReader):
    """A checkpoint whose fp8 tensors appear as float32 ones under the same names, and whose scales do not appear.

    Tensors in other dtypes (norms, routers, embeddings) are handed through.

    Raises:
        CheckpointError: also where an fp8 tensor has no scales, or scales of another shape than its blocks.
    """

    def __init__(self, path: str | Path, blocks: FP8Blocks) -> None:
        super().__init__(path)
        self._blocks = blocks

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) and not self._is_scale(name)

    def names(self) -> list[str]:
        """Names of all tensors but the scales."""
        return [name for name in super().names() if not self._is_scale(name)]

    def headers(self) -> dict[str, tuple[str, ...]]:
        """As of the base class, without the scales."""
        return {name: files for name, files in super().headers().items() if not self._is_scale(name)}

    def dtype(self, name: str) -> torch.dtype:
        """float32 of a quantised tensor, else the stored dtype."""
        return torch.float32 if self._is_fp8(name) else super().dtype(name)

    def read(self, name: str, slices: Sequence[slice] = (), *, check_finite: bool = True) -> Tensor:
        """Part of a tensor, dequantised; a slice may cut blocks. Reads the bytes of the slice and of its scales."""
        if not self._is_fp8(name):
            return super().read(name, slices, check_finite=check_finite)
        shape = self.shape(name)
        parts = tuple(slices) + tuple(slice(0, size) for size in shape[len(slices) :])
        self._check_inside(name, parts, shape)
        lead, (rows, columns) = parts[:-2], parts[-2:]
        high, wide = self._blocks.rows, self._blocks.columns
        self._check_scales(name, shape)
        scales = super().read(name + SCALE_SUFFIX, (*lead, _covering(rows, high), _covering(columns, wide)))
        values = self._slice(name)[parts].to(torch.float32)
        _scale_blocks(values, scales.float(), (rows.start % high, high), (columns.start % wide, wide))
        if check_finite:
            self._check_finite(name, values)
        return values

    def _is_fp8(self, name: str) -> bool:
        return self._slice(name).get_dtype() == _FP8

    def _is_scale(self, name: str) -> bool:
        # A scale whose weight is absent stays visible: the audit reports it.
        return name.endswith(SCALE_SUFFIX) and super().__contains__(name.removesuffix(SCALE_SUFFIX))

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        scales = name + SCALE_SUFFIX
        expected = (*shape[:-2], -(-shape[-2] // self._blocks.rows), -(-shape[-1] // self._blocks.columns))
        found = self.shape(scales)
        if found != expected:
            raise CheckpointError(
                "scales do not fit their blocks",
                file=self.file(scales),
                field=scales,
                found=found,
                expected=f"{expected}: blocks of {self._blocks.rows} x {self._blocks.columns} of {shape}",
                setting="quantization_config.weight_block_size",
            )


def _covering(part: slice, block: int) -> slice:
    """The blocks that a range of entries touches; none for an empty one."""
    first = part.start // block
    return slice(first, max(first, -(-part.stop // block)) if part.stop > part.start else first)


def _scale_blocks(values: Tensor, scales: Tensor, row: tuple[int, int], column: tuple[int, int]) -> None:
    """Multiply in place, a row of blocks at a time: the expanded scales of one row exist, never those of all.

    Args:
        values: float32 [..., r, c].
        scales: float32 [..., blocks of r, blocks of c].
        row, column: (entries of the first block that lie before the values, block length).
    """
    (before, high), (left, wide) = row, column
    count = values.shape[-1]
    for i in range(scales.shape[-2]):
        band = slice(max(0, i * high - before), (i + 1) * high - before)
        wide_scales = scales[..., i : i + 1, :].repeat_interleave(wide, -1)[..., left : left + count]
        values[..., band, :] *= wide_scales
