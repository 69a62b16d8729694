"""The only room that imports Megatron: model, parallelism, forward and backward, optimizer, anchor, checkpoint."""

from __future__ import annotations

from megatron_rl.backend import platform

__all__ = ["platform"]
