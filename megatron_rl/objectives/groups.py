"""Baselines without a critic: advantages from the rewards of responses to the same prompt.

`rewards` and `group_ids` `[B]` are those of the *global* batch, since a group may be split over ranks. Groups may have
any size, and their members any order. `included` (bool `[B]`) leaves excluded outcomes out of the statistics and gives
them an advantage of 0; overlong-filtered responses are included. Results are float64.
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
    group: Tensor
    """int64 `[B]`: number of the response's group, 0 to groups - 1."""
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
        return _group_sum(values, self.group)[self.group]


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
    """R - mean; exactly 0 in groups of equal rewards, where the rounded mean would leave a common non-zero rest."""
    return torch.where(group.included & ~group.uniform, group.rewards - group.mean, 0.0)


@torch.no_grad()
def grpo(rewards: Tensor, group_ids: Tensor, included: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(R - mean)/(std + ε) within each group, population standard deviation (GRPO, 2402.03300). float64 `[B]`."""
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
    """R minus the mean reward of the *other* members of its group (RLOO, 2402.14740). float64 `[B]`.

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
    """Which responses belong to a group with max > min (dynamic sampling, DAPO, 2503.14476): bool `[B]`.

    A positive standard deviation would not do as the criterion: that of six rewards of 0.7 is 1e-16.
    """
    group = _grouped(rewards, group_ids, included)
    return group.included & ~group.uniform


def dirichlet_draws(draws: int, components: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniform points of the simplex (Dirichlet with all parameters 1): float64 `[draws, components]`, rows sum to 1."""
    exponential = torch.empty(draws, components, dtype=torch.float64).exponential_(generator=generator)
    return exponential / exponential.sum(-1, keepdim=True)


@torch.no_grad()
def set_rewards(answer_rewards: Tensor, answer_offsets: Tensor, weights: Tensor) -> Tensor:
    """R(set) = mean over draws w of max over answers y of wᵀ r(y), for the rollouts of *one prompt* (VPO, 2605.22817).

    `grpo` of the result is the set advantage of each rollout, shared by all its decisions.

    Args:
        answer_rewards: r `[A, R]`: A answers of all rollouts one after the other, R reward components.
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
    """Coefficients of DRPO's loss, formed from whole groups before it; float64, detached."""

    positive_weights: Tensor
    """ω `[B]`: sums to 1 over the correct responses of a group; 0 for incorrect ones."""
    score: Tensor
    """d objective / d s, `[B]`: ω for correct responses, -softmax(s/τ) over the incorrect ones of the group."""
    objective: Tensor
    """`[B]`: the objective of the response's group, repeated; 0 for groups with a single outcome."""
    prompts: Tensor
    """Number of groups, by which the loss is divided; groups with a single outcome count."""


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
    """Coefficients of the objective of a prompt, Σ_pos ω_i [s_i - τ log Σ_neg exp(s_j/τ)] (DRPO, 2510.04474).

    ω_i ∝ exp((1 - |o_i|/L_max)/λ) over the correct responses of the prompt.

    Args:
        scores: s_i = mean token log π_θ of response i, `[B]`.
        correct: bool `[B]`.
        lengths: |o_i| tokens, `[B]`.
        group_ids: int64 `[B]`, one per prompt.
    Returns:
        `DrpoCoefficients`; `policy.drpo` makes the loss of its `score`.
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
    """Coefficient sg(β [KL - δ]₊) of the KL term in DRPO's loss (2510.04474), scalar.

    The term is the token mean of -ℓ, the k1 estimator of KL(π_old‖π_θ); `global_kl` is its value over all ranks.
    """
    return beta * (global_kl.detach() - delta).clamp(min=0)
