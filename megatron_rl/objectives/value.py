"""Value regression and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.objectives.numerics import Moments, check_same_shape, widen


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """½(V-G)², or clipped ½ max((V-G)², (clip(V, V_old ± ε_V) - G)²), per decision (or per turn).

    Args:
        values: V `[D]`, carries gradients.
        returns: G `[D]`.
        old_values: V_old `[D]` of the critic before the update; unused without `clip`.
        clip: ε_V; None leaves the loss unclipped.
    Returns:
        (loss `[D]`, clipped bool `[D]`: the clipped branch won and the gradient is zero).
    """
    check_same_shape(values=values, returns=returns)
    values, returns = widen(values), widen(returns)
    error = (values - returns).square()
    if clip is None or old_values is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    check_same_shape(values=values, old_values=old_values)
    low, high = old_values - clip, old_values + clip
    bounded_error = (torch.maximum(torch.minimum(values, high), low) - returns).square()
    clipped = ((values < low) | (values > high)) & (bounded_error > error)
    return 0.5 * torch.where(clipped, bounded_error, error), clipped


def explained_variance(return_moments: Moments, residual_moments: Moments) -> Tensor:
    """EV = 1 - Var(G-V)/Var(G), float64 scalar, from moments of G and of G - V over the global batch.

    Var(G) = 0, or an empty batch, gives 0: there is nothing to explain.
    """
    nothing = return_moments.variance == 0
    share = residual_moments.variance / torch.where(nothing, 1.0, return_moments.variance)
    return torch.where(nothing, 0.0, 1.0 - share)
