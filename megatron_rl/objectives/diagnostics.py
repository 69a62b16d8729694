"""Diagnostics of policy and sampler, as sums that can be added over micro-batches and ranks.

Unless stated otherwise a result is a float64 tensor `[..., 2]` of (numerator, denominator): add the parts, then divide
with `importance.ratio`. The mean of means of unequal parts would be another quantity.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.objectives.divergence import estimate
from megatron_rl.objectives.numerics import check_same_shape, widen


@torch.no_grad()
def mean_sums(values: Tensor) -> Tensor:
    """(Σ values, count); the mean of bool values is a fraction."""
    values = values.double()
    return torch.stack((values.sum(), values.new_tensor(float(values.numel()))))


@torch.no_grad()
def extreme_ratio(log_ratio: Tensor, tau: float) -> Tensor:
    """F(τ): fraction of decisions with max(ρ, 1/ρ) > τ."""
    return mean_sums(widen(log_ratio).abs() > math.log(tau))


class Mismatch(NamedTuple):
    """Distance between the trainer's policy π and the sampler's μ; ρ = π/μ at the decisions given."""

    k1: Tensor
    """Mean of -log ρ, which estimates KL(μ‖π)."""
    k3: Tensor
    """Mean of ρ - 1 - log ρ, which estimates the same with less variance and is never negative."""
    extreme2: Tensor
    """F(2) of `extreme_ratio`."""
    extreme5: Tensor
    """F(5) of `extreme_ratio`."""
    largest: Tensor
    """max |log ρ|, nats, scalar; combine parts with max, not by adding. 0 for no decisions."""
    probabilities: Tensor
    """`[6]` of `pearson_sums`, for `pearson`."""


@torch.no_grad()
def mismatch(logprobs: Tensor, behaviour_logprobs: Tensor) -> Mismatch:
    """`Mismatch` from log π and log μ, both `[D]`."""
    check_same_shape(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    log_ratio = widen(logprobs) - widen(behaviour_logprobs)
    largest = log_ratio.abs().max() if log_ratio.numel() else log_ratio.new_zeros(())
    return Mismatch(
        mean_sums(estimate(-log_ratio, "k1")),
        mean_sums(estimate(-log_ratio, "k3")),
        extreme_ratio(log_ratio, 2.0),
        extreme_ratio(log_ratio, 5.0),
        largest,
        pearson_sums(widen(logprobs).exp(), widen(behaviour_logprobs).exp()),
    )


@torch.no_grad()
def pearson_sums(x: Tensor, y: Tensor) -> Tensor:
    """(n, Σx, Σy, Σx², Σy², Σxy), float64 `[6]`, of probabilities `[D]` minus 1."""
    # The probabilities of a peaked policy lie close to 1: sums of their distance from it lose fewer digits.
    x, y = x.double() - 1, y.double() - 1
    count = x.new_tensor(float(x.numel()))
    return torch.stack((count, x.sum(), y.sum(), x.square().sum(), y.square().sum(), (x * y).sum()))


def pearson(sums: Tensor) -> Tensor:
    """Correlation coefficient of added `pearson_sums`, scalar in [-1, 1]; 0 if either side has no variance."""
    n, x, y, xx, yy, xy = sums.unbind(-1)
    n = n.clamp(min=1)
    spread = ((xx - x * x / n).clamp(min=0) * (yy - y * y / n).clamp(min=0)).sqrt()
    return torch.where(spread > 0, (xy - x * y / n) / torch.where(spread > 0, spread, 1.0), 0.0).clamp(-1, 1)


@torch.no_grad()
def sums_by_position(values: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
    """(Σ values, count) of each range of positions in the sequence, float64 `[n + 1, 2]`.

    Args:
        values: `[D]`.
        positions: int64 `[D]`, position of each decision in its sequence.
        edges: ascending int64 `[n]`; bin i holds edges[i-1] <= position < edges[i].
    """
    check_same_shape(values=values, positions=positions)
    bins = torch.bucketize(positions, edges, right=True)
    rows = torch.stack((values.double(), torch.ones_like(values, dtype=torch.float64)), dim=-1)
    return rows.new_zeros(edges.numel() + 1, 2).index_add(0, bins, rows)


def staleness_histogram(staleness: Tensor, maximum: int) -> Tensor:
    """Number of decisions of each age in updates, int64 `[maximum + 1]`; the last bin holds `maximum` and older."""
    return torch.bincount(staleness.clamp(0, maximum), minlength=maximum + 1)


class PromptInformation(NamedTuple):
    """How much N responses depend on their prompts (RAGEN-2, 2604.06268)."""

    mutual_information: Tensor
    """Mean of matched - marginal, nats per token; at most log N per sequence."""
    retrieval: Tensor
    """Share of responses that are likeliest under their own prompt."""


@torch.no_grad()
def prompt_information(cross_logprobs: Tensor, lengths: Tensor) -> PromptInformation:
    """Matched minus marginal log-likelihood and retrieval accuracy.

    matched_i = log p(Z_i|X_i)/|Z_i|, marginal_i = log mean_j p(Z_i|X_j)/|Z_i|.

    Args:
        cross_logprobs: log p(Z_i|X_j) summed over the response, `[N, N]`, row i the response, column j the prompt.
        lengths: |Z_i| tokens, `[N]`, positive.
    """
    logprobs = cross_logprobs.double()
    marginal = torch.logsumexp(logprobs, dim=1) - math.log(max(logprobs.shape[1], 1))
    own = torch.arange(logprobs.shape[0], device=logprobs.device)
    gain = (logprobs.diagonal() - marginal) / lengths
    best = logprobs.argmax(dim=1) if logprobs.numel() else own
    return PromptInformation(mean_sums(gain), mean_sums(best == own))
