"""Value loss, explained variance, and targets of a turn critic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.objectives.numerics import Moments, check_same_shape, widen


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """½(V-G)², or ½ max((V-G)², (clip(V, V_old ± ε_V) - G)²) with clipping, per decision or turn.

    Args:
        values: V `[D]`, carries gradients.
        returns: G `[D]`.
        old_values: V_old `[D]` of the critic before the update; unused without `clip`.
        clip: ε_V; None leaves the loss unclipped.
    Returns:
        (loss `[D]`, clipped bool `[D]`: the clipped value gives the loss, and the gradient is zero).
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

    0 if Var(G) = 0, as for an empty batch.
    """
    nothing = return_moments.variance == 0
    share = residual_moments.variance / torch.where(nothing, 1.0, return_moments.variance)
    return torch.where(nothing, 0.0, 1.0 - share)


def place_on_first_decisions(per_turn: Tensor, turn_offsets: Tensor) -> Tensor:
    """Targets or loss weights of a turn critic at the first decision of each turn: `[K]` -> `[D]`, 0 elsewhere.

    The value of turn k is read where its first token is predicted; the critic is trained there only (Turn-PPO,
    2512.17008). Its loss weights are `aggregation.sequence_weights("sequence_mean", K_i, ...)`, 1/(B₊ K_i) per turn.

    Args:
        per_turn: for instance the critic targets of `advantages.turn_gae`.
        turn_offsets: int64 `[K+1]` into decisions; no turn is empty.
    """
    check_same_shape(turn_offsets=turn_offsets[:-1], per_turn=per_turn)
    return per_turn.new_zeros(int(turn_offsets[-1])).index_copy(0, turn_offsets[:-1], per_turn)


def stopped_rising(explained: Sequence[float], patience: int = 3, least_gain: float = 0.01) -> bool:
    """Whether explained variance has stopped rising, which ends value pretraining (VC-PPO, 2503.01491).

    The criterion is a choice made here: none of the last `patience` values exceeds the best one before them by
    `least_gain`. A value that is not finite exceeds nothing.

    Args:
        explained: one `explained_variance` for each round so far, oldest first.
        patience: rounds to wait, >= 1.
    """
    finite = [value if math.isfinite(value) else -math.inf for value in explained]
    before, last = finite[:-patience], finite[-patience:]
    return bool(before) and max(last) < max(before) + least_gain
