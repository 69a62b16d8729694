"""PPO-EWMA (2110.00641): an exponentially weighted average of the weights, used as the proximal anchor.

Z_0 = 1, θ̄_0 = θ_0; after optimiser step n: Z_n = βZ_{n-1} + 1, θ̄_n = (βZ_{n-1} θ̄_{n-1} + θ_n)/Z_n. Ticks only after
a completed policy step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError


@torch.no_grad()
def ewma_update(z: float, decay: float, average: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """One tick, in place on `average`; returns Z_n.

    βZ_{n-1} = Z_n - 1, so the update is θ̄ += (θ - θ̄)/Z_n: one pass, and exact where θ = θ̄.

    Args:
        z: Z_{n-1}; 1 before the first step.
        decay: β in [0, 1).
        average: θ̄, float32 or wider, any shards.
        weights: θ_n, the same shards, any floating dtype.
    Raises:
        ConfigError: β is out of range.
        ValueError: the lists differ in length.
    """
    if not 0 <= decay < 1:
        raise ConfigError("EWMA decay out of range", found=decay, expected="[0, 1)", setting="algorithm.anchor.decay")
    z = decay * z + 1
    for mean, weight in zip(average, weights, strict=True):
        mean.lerp_(weight.to(mean.dtype), 1 / z)
    return z


def centre_of_mass(decay: float) -> float:
    """β/(1-β): mean age of the average, in optimiser steps."""
    return decay / (1 - decay)


def rescaled_decay(decay: float, batch_divisor: float) -> float:
    """Decay for batches `batch_divisor` times smaller: the centre of mass grows as much.

    Adam's learning rate is to fall by the root of `batch_divisor`.
    """
    mass = centre_of_mass(decay) * batch_divisor
    return mass / (1 + mass)
