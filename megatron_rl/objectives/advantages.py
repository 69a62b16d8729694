"""Advantages and returns from a critic: GAE on decisions or on turns, whitening, and the EVPO switch.

Values are those of the critic before the update. Nothing here carries gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.objectives.numerics import Moments, check_same_shape, moments, widen
from megatron_rl.objectives.recurrence import discounted_suffix_sums
from megatron_rl.objectives.segments import check_offsets, last_positions, local_segment_sum
from megatron_rl.objectives.value import explained_variance


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    offsets: Tensor,
    *,
    gamma: float,
    lam_actor: float | Tensor,
    lam_critic: float | Tensor = 1.0,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438), decoupled for actor and critic (VC-PPO, 2503.01491).

    δ_j = u_j + γ V_{j+1} - V_j with V_J the successor value; A_j = δ_j + γλ A_{j+1}; G_j = A_j(λ_critic) + V_j. γ and λ
    apply once per decision: V_{j+1} is the value at the next decision, never at an observation token.

    Args:
        rewards, values: `[D]`.
        offsets: int64 `[B+1]`; empty sequences are allowed.
        gamma: discount in [0, 1].
        lam_actor, lam_critic: λ in [0, 1], one number or one per sequence `[B]` (see `length_adaptive_lambda`).
        bootstrap: `[B]` successor value: 0 if terminated, V(s_boundary) if truncated.
    Returns:
        (advantages `[D]` with λ_actor, returns `[D]` with λ_critic), at least float32.
    Raises:
        RolloutError: shapes or offsets disagree.
    """
    rewards, values = widen(rewards), widen(values)
    check_same_shape(rewards=rewards, values=values)
    check_offsets(offsets, rewards.numel())
    check_same_shape(offsets=offsets[1:], bootstrap=bootstrap)
    errors = _temporal_differences(rewards, values, offsets, gamma, bootstrap)
    advantages = discounted_suffix_sums(errors, gamma * lam_actor, offsets)
    if lam_critic is lam_actor:
        return advantages, advantages + values
    return advantages, discounted_suffix_sums(errors, gamma * lam_critic, offsets).add_(values)


def _temporal_differences(rewards: Tensor, values: Tensor, offsets: Tensor, gamma: float, bootstrap: Tensor) -> Tensor:
    successors = torch.empty_like(values)
    successors[:-1] = values[1:]
    successors[last_positions(offsets)] = bootstrap[offsets.diff() > 0].to(values.dtype)
    return torch.add(rewards, successors, alpha=gamma, out=successors).sub_(values)


@torch.no_grad()
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turn_offsets: Tensor,
    sequence_turn_offsets: Tensor,
    *,
    gamma: float = 0.99,
    lam_actor: float | Tensor = 0.9,
    lam_critic: float | Tensor = 1.0,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """GAE with turns as time steps (Turn-PPO, 2512.17008).

    V_k is the value at the decision state of turn k, that of its first decision; r_k sums the turn's rewards.

    Args:
        rewards, values: `[D]`, per decision.
        turn_offsets: int64 `[K+1]` into decisions; no turn is empty.
        sequence_turn_offsets: int64 `[B+1]` into turns.
        bootstrap: `[B]`, as for `gae`.
    Returns:
        (advantages `[K]`, critic targets `[K]`). Copy the advantages to a turn's decisions with `segments.repeat`; the
        critic is trained at each turn's first decision only.
    """
    check_same_shape(rewards=rewards, values=values)
    check_offsets(turn_offsets, rewards.numel(), "turn_offsets")
    return gae(
        local_segment_sum(rewards, turn_offsets),
        values[turn_offsets[:-1]],
        sequence_turn_offsets,
        gamma=gamma,
        lam_actor=lam_actor,
        lam_critic=lam_critic,
        bootstrap=bootstrap,
    )


def length_adaptive_lambda(lengths: Tensor, gamma: float, alpha: float) -> Tensor:
    """λ_i = clamp((1 - 1/(α J_i))/γ, 0, 1), from 1/(1-γλ) = α J (VAPO, 2504.05118).

    Args:
        lengths: decisions J_i of the whole sequence, `[B]`.
        gamma: in (0, 1].
        alpha: 0.05 in VAPO, 1.5 in SAO (2607.07508).
    Returns:
        float64 `[B]`; 0 for an empty sequence.
    Raises:
        ConfigError: γ or α is not positive.
    """
    if gamma <= 0 or alpha <= 0:
        raise ConfigError(
            "length-adaptive λ divides by γ and α", found=(gamma, alpha), expected="> 0", setting="gamma, alpha"
        )
    return ((1 - 1 / (alpha * lengths.double())) / gamma).clamp(0.0, 1.0)


@torch.no_grad()
def whiten(advantages: Tensor, eps: float = 1e-8) -> Tensor:
    """Ã = (A - mean)/sqrt(var + ε), with the population variance, formed in float64.

    Applied once per rollout batch to all decisions of the policy loss, never to critic targets.

    Args:
        advantages: `[D]` of the *global* batch.
    Returns:
        `[D]`, dtype of `advantages`. Zero variance gives zeros.
    """
    batch = moments(advantages)
    return ((advantages.double() - batch.mean) / (batch.variance + eps).sqrt()).to(advantages.dtype)


@torch.no_grad()
def evpo(
    critic_advantages: Tensor, returns: Tensor, return_moments: Moments, residual_moments: Moments
) -> tuple[Tensor, Tensor]:
    """EVPO (2604.19485): the critic's advantages if its explained variance is positive, else G - mean(G).

    The critic is trained in both cases.

    Args:
        critic_advantages: `[D]`.
        returns: Monte-Carlo returns G `[D]`.
        return_moments, residual_moments: of G and of G - V over the global batch.
    Returns:
        (advantages `[D]`, explained variance, float64 scalar, 0 if Var(G) = 0).
    """
    check_same_shape(critic_advantages=critic_advantages, returns=returns)
    explained = explained_variance(return_moments, residual_moments)
    centred = (returns.double() - return_moments.mean).to(critic_advantages.dtype)
    return torch.where(explained > 0, critic_advantages, centred), explained
