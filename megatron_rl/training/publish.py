"""Weights from the trainer to users and engines: streamed HF checkpoints that appear atomically."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.backend.model import Model
from megatron_rl.backend.weights import export_hf
from megatron_rl.hf.shard_file import Piece
from megatron_rl.hf.writer import StreamingWriter


def write_hf(model: Model, target: Path, source: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a live model as an HF checkpoint. Collective; rank 0 writes, all ranks return when it is complete.

    Args:
        target: directory that appears when done; replaced if it is an earlier export.
        source: checkpoint whose configuration and tokenizer files go along.
        dtype: cast on the way; None: as trained.
    """
    write_hashed_hf(model, target, source, dtype=dtype)
    return target


def write_hashed_hf(
    model: Model, target: Path, source: str | Path, *, dtype: torch.dtype | None = None
) -> dict[str, list[Piece]]:
    """As `write_hf`; returns the pieces of each weights file on rank 0, nothing on others."""
    tensors = export_hf(model, dtype=dtype)
    pieces: dict[str, list[Piece]] = {}
    if dist.get_rank() == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        with StreamingWriter(target, model.hf, source, overwrite=True) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
        pieces = writer.pieces
    else:
        for _ in tensors:
            pass
    dist.barrier()
    return pieces
