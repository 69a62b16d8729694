"""Optimizers."""

from __future__ import annotations

from pydantic import Field

from megatron_rl.section import Section


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay and clipping on the global gradient norm."""

    lr: float = Field(1e-6, ge=0)
    """Largest learning rate, reached after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate falls linearly to `min_lr` after the warm-up; 0: constant."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate after the decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Added to √v̂."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
