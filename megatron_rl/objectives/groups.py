"""Baselines without a critic: advantages from the rewards of responses to the same prompt.

`rewards` and `group_ids` cover the *global* batch (B numbers: gather them first), since a group may be split over
ranks. Groups may have any size and order. `included` (bool `[B]`) takes excluded outcomes out of the statistics: their
advantage is 0. Overlong-filtered responses stay in. Everything is formed in float64 and returned in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import RolloutError
from megatron_rl.objectives.numerics import check_same_shape, moments


class _Grouped(NamedTuple):
    rewards: Tensor
    """float64 `[B]`, 0 where excluded."""
    index: Tensor
    """int64 `[B]`: dense group number."""
    included: Tensor
    """bool `[B]`."""
    size: Tensor
    """float64 `[B]`: included members of the response's group."""
    mean: Tensor
    """float64 `[B]`: mean reward of the response's group."""
    uniform: Tensor
    """bool `[B]`: max = min in the response's group."""

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` `[B]` over each response's group, copied to the response."""
        return _group_sum(values, self.index)[self.index]


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    groups = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(groups).index_add(0, index, values)


def _group_max(values: Tensor, index: Tensor) -> Tensor:
    groups = int(index.max()) + 1 if index.numel() else 0
    return values.new_full((groups,), -torch.inf).scatter_reduce(0, index, values, "amax")


def _grouped(rewards: Tensor, group_ids: Tensor, included: Tensor | None) -> _Grouped:
    check_same_shape(rewards=rewards, group_ids=group_ids)
    included = torch.ones_like(group_ids, dtype=torch.bool) if included is None else included
    index = torch.unique(group_ids, return_inverse=True)[1]
    rewards = torch.where(included, rewards.double(), 0.0)
    size = _group_sum(included.double(), index)
    mean = _group_sum(rewards, index) / size.clamp(min=1)
    high = _group_max(torch.where(included, rewards, -torch.inf), index)
    low = -_group_max(torch.where(included, -rewards, -torch.inf), index)
    return _Grouped(rewards, index, included, size[index], mean[index], (high <= low)[index])


def _centred(group: _Grouped) -> Tensor:
    """R - mean; exactly 0 in groups of equal rewards, where rounding of the mean would leave noise of one sign."""
    return torch.where(group.included & ~group.uniform, group.rewards - group.mean, 0.0)


@torch.no_grad()
def grpo(rewards: Tensor, group_ids: Tensor, included: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(R - mean)/(std + ε) within each group, population standard deviation (GRPO). float64 `[B]`."""
    group = _grouped(rewards, group_ids, included)
    centred = _centred(group)
    deviation = (group.total(centred.square()) / group.size.clamp(min=1)).sqrt()
    return torch.where(group.uniform, 0.0, centred / torch.where(group.uniform, 1.0, deviation + eps))


@torch.no_grad()
def dr_grpo(rewards: Tensor, group_ids: Tensor, included: Tensor | None = None) -> Tensor:
    """R - mean within each group (Dr.GRPO, 2503.20783), float64 `[B]`; loss weight `constant` with C = B·L_max."""
    return _centred(_grouped(rewards, group_ids, included))


@torch.no_grad()
def rloo(rewards: Tensor, group_ids: Tensor, included: Tensor | None = None) -> Tensor:
    """R minus the mean reward of the *other* members of its group (leave one out). float64 `[B]`.

    Raises:
        RolloutError: an included response is alone in its group.
    """
    group = _grouped(rewards, group_ids, included)
    alone = group.included & (group.size < 2)
    if bool(alone.any()):
        raise RolloutError(
            "leave-one-out needs two responses in a group",
            row=int(alone.nonzero()[0]),
            field="group_id",
            found=1,
            expected=">= 2",
            setting="responses per prompt, or another advantage estimator",
        )
    # R - (S-R)/(n-1) = (R - mean) n/(n-1)
    return _centred(group) * group.size / (group.size - 1).clamp(min=1)


@torch.no_grad()
def batch_mean_baseline(rewards: Tensor, included: Tensor | None = None) -> Tensor:
    """R minus the mean over the whole batch (REINFORCE with a baseline). float64 `[B]`."""
    included = torch.ones_like(rewards, dtype=torch.bool) if included is None else included
    return torch.where(included, rewards.double() - moments(rewards, included).mean, 0.0)


@torch.no_grad()
def dynamic_sampling_keep(rewards: Tensor, group_ids: Tensor, included: Tensor | None = None) -> Tensor:
    """Which responses belong to a group with max > min (DAPO dynamic sampling): bool `[B]`.

    Decided on max = min, not on a positive standard deviation: six rewards of 0.7 have one of 1e-16.
    """
    group = _grouped(rewards, group_ids, included)
    return group.included & ~group.uniform


def dirichlet_draws(draws: int, components: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniform points of the simplex (Dirichlet with all parameters 1): float64 `[draws, components]`, rows sum to 1."""
    exponential = torch.empty(draws, components, dtype=torch.float64).exponential_(generator=generator)
    return exponential / exponential.sum(-1, keepdim=True)


@torch.no_grad()
def set_rewards(answer_rewards: Tensor, answer_offsets: Tensor, weights: Tensor) -> Tensor:
    """VPO (2605.22817): R(set) = mean over draws w of max over answers y of wᵀ r(y), for the rollouts of *one prompt*.

    `grpo` of the result is the set advantage, which goes to every decision of its rollout.

    Args:
        answer_rewards: r `[A, R]`, answers of all rollouts one after the other, R reward components.
        answer_offsets: int64 `[B+1]` into the answers.
        weights: w `[W, R]`, drawn once per prompt and shared by its rollouts (`dirichlet_draws`).
    Returns:
        float64 `[B]`.
    Raises:
        RolloutError: a rollout gave no answer.
    """
    counts = answer_offsets.diff()
    if bool((counts == 0).any()):
        raise RolloutError(
            "a rollout without answers has no set reward", row=int((counts == 0).nonzero()[0]), expected=">= 1 answer"
        )
    scores = answer_rewards.double() @ weights.double().T
    return torch.segment_reduce(scores, "max", offsets=answer_offsets).mean(-1)


class DrpoCoefficients(NamedTuple):
    """What the whole-group pre-pass of DRPO leaves for the loss; all float64 and detached."""

    positive_weights: Tensor
    """ω `[B]`: sums to 1 over the correct responses of a group; 0 for incorrect ones."""
    score: Tensor
    """d objective / d s, `[B]`: ω for correct responses, -softmax(s/τ) over the incorrect ones of the group."""
    objective: Tensor
    """`[B]`: the objective of the response's group, repeated; 0 for groups with a single outcome."""
    prompts: Tensor
    """Number of groups, single-outcome ones included: what the loss is divided by."""


@torch.no_grad()
def drpo_coefficients(
    scores: Tensor,
    correct: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    *,
    max_length: int,
    lam: float = 0.1,
    tau: float = 10.0,
) -> DrpoCoefficients:
    """DRPO (2510.04474), per prompt: Σ_pos ω_i [s_i - τ log Σ_neg exp(s_j/τ)], ω_i ∝ exp((1 - |o_i|/L_max)/λ).

    Args:
        scores: s_i = mean token log π_θ of response i, `[B]`.
        correct: bool `[B]`.
        lengths: |o_i| tokens, `[B]`.
        group_ids: int64 `[B]`, one per prompt.
    Returns:
        `DrpoCoefficients`; `policy.drpo` turns `score` into a loss.
    """
    check_same_shape(scores=scores, correct=correct, lengths=lengths, group_ids=group_ids)
    scores, correct = scores.double(), correct.bool()
    index = torch.unique(group_ids, return_inverse=True)[1]
    positive, has_positive, _ = _group_softmax((1 - lengths.double() / max_length) / lam, correct, index)
    negative, has_negative, log_total = _group_softmax(scores / tau, ~correct, index)
    both = has_positive & has_negative
    positive = torch.where(both & correct, positive, 0.0)
    coefficients = torch.where(both & ~correct, -negative, positive)
    expected = _group_sum(positive * torch.where(both, scores, 0.0), index)[index]
    objective = torch.where(both, expected - tau * log_total, 0.0)
    return DrpoCoefficients(
        positive, coefficients, objective, _group_sum(torch.ones_like(scores), index).count_nonzero()
    )


def _group_softmax(logits: Tensor, member: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the members of each group: (probabilities, group has a member, log-sum-exp), each `[B]`.

    The last is 0 for a group without members.
    """
    top = _group_max(torch.where(member, logits, -torch.inf), index)[index]
    populated = top > -torch.inf
    top = torch.where(populated, top, 0.0)
    exponential = torch.where(member, torch.where(member, logits - top, 0.0).exp(), 0.0)
    total = torch.where(populated, _group_sum(exponential, index)[index], 1.0)
    return exponential / total, populated, top + total.log()


def drpo_kl_coefficient(global_kl: Tensor, beta: float = 1e3, delta: float = 1e-4) -> Tensor:
    """DRPO's constraint as a loss coefficient: sg(β [KL - δ]₊), scalar.

    Multiply with the weighted per-decision estimator -ℓ (k1 of the sampling policy against π_θ); its global token mean
    is `global_kl`, reduced over all ranks beforehand.
    """
    return beta * (global_kl.detach() - delta).clamp(min=0)
