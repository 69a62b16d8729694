"""Slow forms of the losses beyond PPO: loops over sequences, turns and decisions, in float64, gradients by autograd.

The package under test is not imported. A `Response` is one trajectory's decisions; the caller leaves out trajectories
without any. Each loss is the scalar of a whole optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Response:
    """J ≥ 1 decisions."""

    logprobs: Tensor
    """float64 [J] log π_θ, carries gradients."""
    anchor: Tensor
    """float64 [J]."""
    advantages: list[float]
    turns: list[int]
    """Turn of each decision, not falling."""
    group: str
    correct: bool = False

    def spans(self) -> list[list[int]]:
        """Decisions of each turn."""
        return [[j for j, turn in enumerate(self.turns) if turn == t] for t in sorted(set(self.turns))]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> tuple[Tensor, bool]:
    """max(−rA, −clip(r)A) of one ratio, and whether it is clipped."""
    inside = ratio.clamp(1 - low, 1 + high)
    found = float(ratio.detach())
    cut = (advantage > 0 and found > 1 + high) or (advantage < 0 and found < 1 - low)
    return torch.maximum(-ratio * advantage, -inside * advantage), cut


def sapo(responses: Sequence[Response], tau_positive: float, tau_negative: float) -> Tensor:
    """Each sequence equal."""
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        for j, advantage in enumerate(r.advantages):
            tau = tau_positive if advantage > 0 else tau_negative
            ratio = (r.logprobs[j] - r.anchor[j]).exp()
            gate = 1 / (1 + (-tau * (ratio - 1)).exp())
            total = total - 4 / tau * gate * advantage / (len(r.turns) * len(responses))
    return total


def cispo(responses: Sequence[Response], high: float) -> Tensor:
    """Each decision equal, no lower bound."""
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        for j, advantage in enumerate(r.advantages):
            weight = min(math.exp(float((r.logprobs[j] - r.anchor[j]).detach())), 1 + high)
            total = total - weight * advantage * r.logprobs[j]
    return total / sum(len(r.turns) for r in responses)


def gspo(responses: Sequence[Response], low: float, high: float) -> Tensor:
    """One clipped ratio per sequence."""
    losses = [clipped((r.logprobs - r.anchor).mean().exp(), r.advantages[0], low, high)[0] for r in responses]
    return sum(losses) / len(responses)


def gmpo(responses: Sequence[Response], log_clip: float) -> Tensor:
    """The geometric mean of ratios, each clipped above if the advantage is positive, below if it is negative."""
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        advantage, logs = r.advantages[0], []
        for ratio in r.logprobs - r.anchor:
            found = float(ratio.detach())
            far = found > log_clip if advantage > 0 else found < -log_clip
            logs.append(torch.full_like(ratio, math.copysign(log_clip, advantage)) if far else ratio)
        total = total - advantage * torch.stack(logs).mean().exp()
    return total / len(responses)


def turn_ppo(responses: Sequence[Response], clip: float) -> Tensor:
    """One clipped ratio per turn, the product over its decisions; the turn's loss counts once per decision."""
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        for span in r.spans():
            ratio = (r.logprobs[span] - r.anchor[span]).sum().exp()
            total = total + clipped(ratio, r.advantages[span[0]], clip, clip)[0] * len(span)
    return total / sum(len(r.turns) for r in responses)


def turn_is(responses: Sequence[Response], clip: float) -> tuple[Tensor, Tensor]:
    """(loss, surrogate of the gradient that clipping removes).

    One clipped geometric mean per turn, with the turn's mean advantage; losses are summed over the decisions of a
    sequence and averaged over sequences.
    """
    total = lost = torch.zeros((), dtype=torch.float64)
    for r in responses:
        for span in r.spans():
            ratio = (r.logprobs[span] - r.anchor[span]).mean().exp()
            advantage = sum(r.advantages[j] for j in span) / len(span)
            loss, cut = clipped(ratio, advantage, clip, clip)
            total = total + loss * len(span)
            if cut:
                lost = lost + float(ratio.detach()) * advantage * r.logprobs[span].sum()
    return total / len(responses), lost / len(responses)


def drpo(
    responses: Sequence[Response], *, tau: float, lam: float, beta: float, delta: float, max_length: int
) -> Tensor:
    """Objective and constraint of each prompt (DRPO), without the closed-form coefficients of the package."""
    groups = sorted({r.group for r in responses})
    objective = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mine = [r for r in responses if r.group == group]
        good, bad = [r for r in mine if r.correct], [r for r in mine if not r.correct]
        if not good or not bad:
            continue
        shares = [math.exp((1 - len(r.turns) / max_length) / lam) for r in good]
        rest = torch.stack([(r.logprobs.mean() / tau).exp() for r in bad]).sum().log() * tau
        for share, r in zip(shares, good, strict=True):
            objective = objective + share / sum(shares) * (r.logprobs.mean() - rest)
    divergence = sum((r.anchor - r.logprobs).sum() for r in responses) / sum(len(r.turns) for r in responses)
    penalty = beta * max(float(divergence.detach()) - delta, 0.0)
    return -objective / len(groups) + penalty * divergence


def dr_grpo(rewards: Sequence[float], groups: Sequence[str]) -> list[float]:
    """R − mean of the group."""
    return [
        reward - sum(r for r, g in zip(rewards, groups, strict=True) if g == group) / list(groups).count(group)
        for reward, group in zip(rewards, groups, strict=True)
    ]
