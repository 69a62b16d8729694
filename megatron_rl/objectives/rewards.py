"""Rewards of decisions, and the value that follows a trajectory's last decision."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.objectives.numerics import check_same_shape, widen
from megatron_rl.objectives.segments import last_positions


def place_rewards(
    terminal: Tensor,
    offsets: Tensor,
    turn_rewards: Tensor | None = None,
    turn_offsets: Tensor | None = None,
) -> Tensor:
    """Rewards r_j per decision: R on decision J-1, feedback g_k added on the last decision of turn k.

    The reward that comes with an observation is that of the turn before it. The terminal reward of a sequence without
    decisions is dropped; such a sequence enters no average.

    Args:
        terminal: R `[B]`.
        offsets: int64 `[B+1]`.
        turn_rewards: g `[K]`, with `turn_offsets` int64 `[K+1]` into the decisions; no turn is empty.
    Returns:
        `[D]`, at least float32.
    Raises:
        RolloutError: only one of `turn_rewards`, `turn_offsets` is given, or they disagree on K.
    """
    if (turn_rewards is None) != (turn_offsets is None):
        raise RolloutError("turn rewards need turn offsets, and the reverse", field="turn_rewards")
    terminal = widen(terminal)
    rewards = terminal.new_zeros(int(offsets[-1]))
    rewards[last_positions(offsets)] = terminal[offsets.diff() > 0]
    if turn_rewards is None or turn_offsets is None:
        return rewards
    ends = last_positions(turn_offsets)
    if ends.shape != turn_rewards.shape:
        raise RolloutError(
            "a reward per non-empty turn is needed", field="turn_rewards", found=len(turn_rewards), expected=len(ends)
        )
    return rewards.index_add(0, ends, turn_rewards.to(rewards.dtype))


def shape_with_kl(rewards: Tensor, behaviour_logprobs: Tensor, reference_logprobs: Tensor, beta: float) -> Tensor:
    """u_j = r_j - β (log μ(a_j) - log π_ref(a_j)), a KL penalty in the reward (1909.08593). All `[D]`.

    Not to be combined with a KL term in the loss, which is another objective; the configuration refuses both.
    """
    check_same_shape(rewards=rewards, behaviour_logprobs=behaviour_logprobs, reference_logprobs=reference_logprobs)
    return rewards - beta * (widen(behaviour_logprobs) - widen(reference_logprobs))


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong penalty (DAPO, 2503.14476): 0 up to Lmax-Lc, then falling linearly to -1 at Lmax, -1 beyond.

    Args:
        lengths: generated tokens L, `[B]`.
        max_length, buffer: Lmax and Lc, tokens.
    Returns:
        float64 `[B]` in [-1, 0].
    Raises:
        ConfigError: `buffer` is not in (0, max_length].
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            "overlong buffer out of range", found=buffer, expected=f"1..{max_length}", setting="overlong buffer"
        )
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def overlong_filter(overlong: Tensor, has_bootstrap: Tensor) -> tuple[Tensor, Tensor]:
    """Overlong filter (DAPO, 2503.14476): truncated trajectories leave the policy loss.

    The critic keeps those whose boundary state is known, since their returns bootstrap from its value. Statistics of
    groups keep all.

    Args:
        overlong: bool `[B]`: truncated by the length limit.
        has_bootstrap: bool `[B]`: the boundary state is known (see `successor_values`).
    Returns:
        (keep for the policy, keep for the critic), bool `[B]`; the others are removed before decisions are counted.
    """
    check_same_shape(overlong=overlong, has_bootstrap=has_bootstrap)
    return ~overlong, ~overlong | has_bootstrap


def successor_values(
    truncated: Tensor,
    boundary_known: Tensor,
    boundary_values: Tensor,
    missing: Literal["error", "drop", "zero"] = "error",
) -> tuple[Tensor, Tensor]:
    """Value after the last decision: V(s_boundary) of a truncated trajectory, 0 of any other.

    Args:
        truncated: bool `[B]`; a terminated trajectory is never truncated.
        boundary_known: bool `[B]`: whether the record holds what became visible after the last decision.
        boundary_values: V(s_boundary) `[B]`; entries that are not truncated or not known are ignored, even if NaN.
        missing: what to do with a truncated trajectory of unknown boundary: raise, drop it, or bootstrap from 0.
    Returns:
        (bootstrap `[B]`, keep bool `[B]`).
    Raises:
        RolloutError: a boundary is unknown and `missing` is "error"; names the first such row.
    """
    unknown = truncated & ~boundary_known
    if missing == "error" and bool(unknown.any()):
        raise RolloutError(
            "truncated trajectory without a boundary state",
            row=int(unknown.nonzero()[0]),
            field="boundary_tokens",
            found="null",
            expected="the tokens seen after the last decision, or an empty list",
            setting="algorithm.missing_boundary",
        )
    bootstrap = torch.where(truncated & boundary_known, widen(boundary_values), 0.0)
    return bootstrap, ~unknown if missing == "drop" else torch.ones_like(unknown)
