"""Arithmetic shared by every objective: wider floats, bounded exponentials, shape checks and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import RolloutError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this where they are exponentiated; exp(20) = 4.9e8 still squares within float32."""


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is float64. Ratios are never formed in a narrower type."""
    return x if x.dtype == torch.float64 else x.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, -20, 20)), at least float32. The gradient is zero where the clamp is active.

    For the ratio of a segment the sum or mean of log-ratios is the argument: a sum of clamped terms would differ.
    """
    return widen(log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_same_shape(**tensors: Tensor) -> None:
    """Raise `RolloutError` unless all tensors have the first one's shape, so that none is broadcast unnoticed."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise RolloutError(
                f"{name} does not lie on the timeline of {first}",
                field=name,
                found=tuple(tensor.shape),
                expected=tuple(reference.shape),
            )


class Moments(NamedTuple):
    """Number of samples, their mean and sum of squared deviations, float64 scalars. `merge_moments` joins several."""

    samples: Tensor
    mean: Tensor
    m2: Tensor
    """Σ (x - mean)²."""

    @property
    def variance(self) -> Tensor:
        """Population variance; 0 for no samples."""
        return self.m2 / self.samples.clamp(min=1)


@torch.no_grad()
def moments(x: Tensor, keep: Tensor | None = None) -> Moments:
    """Two-pass moments of `x` `[D]` in float64, over the entries where `keep` (bool `[D]`) is true.

    The first entry is subtracted before averaging, so that a constant `x` has a variance of exactly zero and a large
    common offset costs no digits.
    """
    x = (x if keep is None else x[keep]).double().reshape(-1)
    count = torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return Moments(count, count.clone(), count.clone())
    shifted = x - x[0]
    deviation = shifted.mean()
    return Moments(count, x[0] + deviation, (shifted - deviation).square().sum())


@torch.no_grad()
def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint samples (Chan, Golub & LeVeque 1979). Empty parts change nothing.

    Raises:
        RolloutError: there is no part at all.
    """
    parts = list(parts)
    if not parts:
        raise RolloutError("moments of no shard at all", expected="at least one, possibly empty, shard")
    total = parts[0]
    for part in parts[1:]:
        total = _merge_pair(total, part)
    return total


def _merge_pair(a: Moments, b: Moments) -> Moments:
    count = a.samples + b.samples
    share = b.samples / count.clamp(min=1)
    gap = b.mean - a.mean
    # An empty side has no mean: its placeholder must not enter the gap.
    gap = torch.where((a.samples > 0) & (b.samples > 0), gap, torch.zeros_like(gap))
    start = torch.where(a.samples > 0, a.mean, b.mean)
    return Moments(count, start + gap * share, a.m2 + b.m2 + gap.square() * a.samples * share)
