"""PPO-EWMA (2110.00641): an exponentially weighted average of the weights, used as the proximal anchor.

Z_0 = 1, θ̄_0 = θ_0; after optimizer step n of the policy: Z_n = βZ_{n-1} + 1, θ̄_n = (βZ_{n-1} θ̄_{n-1} + θ_n)/Z_n. A
step that was skipped does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError


@torch.no_grad()
def ewma_update(z: float, decay: float, average: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """One update, in place on `average`; returns Z_n.

    As βZ_{n-1} = Z_n - 1, it is θ̄ += (θ - θ̄)/Z_n: one pass over memory, and no change of any bit where θ = θ̄.

    Args:
        z: Z_{n-1}; 1 before the first step.
        decay: β in [0, 1).
        average: θ̄, float32 or wider, whole tensors or shards.
        weights: θ_n, cut alike, any floating dtype.
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
    """β/(1-β): mean age of the averaged weights, optimizer steps. 8 for the default β = 0.889."""
    return decay / (1 - decay)


def rescaled_decay(decay: float, batch_divisor: float) -> float:
    """β for batches `batch_divisor` times smaller: its centre of mass is `batch_divisor` times that of `decay`.

    2110.00641 divides Adam's learning rate by the square root of `batch_divisor` at the same time.
    """
    mass = centre_of_mass(decay) * batch_divisor
    return mass / (1 + mass)
