"""The slow reference for a PPO step: loops over sequences and decisions in float64, autograd for every gradient.

It covers all that a parallel layout can affect: replayed routes, temperature, masked GAE, clipping, importance weights,
KL, entropy, aggregation, gradient clipping, AdamW and EWMA. Nothing is packed, padded, sharded or fused, and neither
Megatron nor the package under test is imported. The model is that of `decoder`.

Axis letters: N tokens of a sequence, J its decisions, L MoE layers, k top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.decoder import Architecture, Weights, forward, logits_of, values_of

# --- one episode -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """One recorded trajectory."""

    tokens: Tensor
    """int64 [N]."""
    action_mask: Tensor
    """bool [N], False first."""
    turn_id: Tensor
    """int64 [N]: turn of each sampled token."""
    behaviour: Tensor
    """float64 [N]: log μ of each sampled token."""
    turn_rewards: Sequence[float]
    reward: float
    truncated: bool = False
    boundary_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [n]: seen after the last decision."""
    routes: Tensor | None = None
    """int64 [L, N-1, k], a negative id marks a missing row."""

    @property
    def decisions(self) -> Tensor:
        """int64 [J]: raw positions q_j."""
        return self.action_mask.nonzero().flatten()


def read_policy(arch: Architecture, weights: Weights, episode: Episode, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [J] of the decisions, read one position earlier, routes replayed."""
    logits = logits_of(weights, forward(arch, weights, episode.tokens, episode.routes).hidden) / temperature
    distribution = logits.log_softmax(-1)[episode.decisions - 1]
    picked = [row[token] for row, token in zip(distribution, episode.tokens[episode.decisions], strict=True)]
    entropies = -(distribution.exp() * distribution).sum(-1)
    return torch.stack(picked) if picked else logits.new_zeros(0), entropies


def read_values(arch: Architecture, weights: Weights, episode: Episode) -> tuple[Tensor, Tensor]:
    """Values [J] at the decisions' states, and the successor value [] after the last one; native routes."""
    seen = torch.cat([episode.tokens, episode.boundary_tokens])
    values = values_of(weights, forward(arch, weights, seen).hidden)
    return values[episode.decisions - 1], values[-1] if episode.truncated else values.new_zeros(())


def place_rewards(episode: Episode) -> list[float]:
    """Rewards of the J decisions: feedback on the last decision of its turn, the terminal reward on the very last."""
    turns = episode.turn_id[episode.decisions].tolist()
    rewards = [0.0] * len(turns)
    for j, turn in enumerate(turns):
        if j + 1 == len(turns) or turns[j + 1] != turn:
            rewards[j] += episode.turn_rewards[turn]
    if rewards:
        rewards[-1] += episode.reward
    return rewards


def gae(rewards: Sequence[float], values: Sequence[float], successor: float, gamma: float, lam: float) -> list[float]:
    """Advantages of the J decisions of one trajectory."""
    advantages, following, advantage = [0.0] * len(rewards), successor, 0.0
    for j in reversed(range(len(rewards))):
        delta = rewards[j] + gamma * following - values[j]
        advantage = delta + gamma * lam * advantage
        advantages[j], following = advantage, values[j]
    return advantages


# --- the objective ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """All settings of the two losses. None switches a term off."""

    temperature: float = 1.0
    gamma: float = 1.0
    lam_actor: float = 0.95
    lam_critic: float = 1.0
    whiten: bool = False
    whiten_eps: float = 1e-8
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    value_clip: float | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    token_is_cap: float | None = None
    sequence_is_cap: float | None = None
    sequence_is_normalise: bool = False
    decoupled: bool = False
    """The anchor is an average of past weights and the ratio is taken to the behaviour policy (PPO-EWMA)."""
    decoupled_ratio_cap: float = 100.0
    aggregation: str = "token_mean"
    """Or `sequence_mean`."""


@dataclass(frozen=True)
class Scored:
    """Constants of one episode's losses, each [J]."""

    behaviour: Tensor
    anchor: Tensor
    reference: Tensor | None
    values: Tensor
    advantages: Tensor
    returns: Tensor


def score(
    arch: Architecture,
    critic: Weights,
    episodes: Sequence[Episode],
    objective: Objective,
    *,
    anchor: Weights | None,
    reference: Weights | None = None,
) -> list[Scored]:
    """Constants of the update of every episode; without `anchor` weights the behaviour policy is the anchor."""
    scored, lambdas = [], (objective.lam_actor, objective.lam_critic)
    for episode in episodes:
        with torch.no_grad():
            values, successor = read_values(arch, critic, episode)
            behaviour = episode.behaviour[episode.decisions]
            read = [
                None if weights is None else read_policy(arch, weights, episode, objective.temperature)[0]
                for weights in (anchor, reference)
            ]
        inputs = (place_rewards(episode), values.tolist(), float(successor), objective.gamma)
        advantages, critic_advantages = (values.new_tensor(gae(*inputs, lam)) for lam in lambdas)
        anchored = behaviour if read[0] is None else read[0]
        scored.append(Scored(behaviour, anchored, read[1], values, advantages, critic_advantages + values))
    return _whitened(scored, objective.whiten_eps) if objective.whiten else scored


def ppo_loss(logprobs: Tensor, anchor: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """[J]: clipped surrogate, capped at -cA for negative advantages under dual clip."""
    ratio = _exp(logprobs - anchor)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if objective.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -objective.dual_clip * advantages), loss)


def decoupled_loss(logprobs: Tensor, scored: Scored, objective: Objective) -> Tensor:
    """[J]: PPO-EWMA's loss, the behaviour policy floored so that π_θ/μ̃ is at most the cap."""
    floored = torch.maximum(scored.behaviour, logprobs.detach() - math.log(objective.decoupled_ratio_cap))
    clipped = _exp(logprobs - scored.anchor).clamp(1 - objective.clip_low, 1 + objective.clip_high)
    clipped = clipped * _exp(scored.anchor - floored)
    return torch.maximum(-_exp(logprobs - floored) * scored.advantages, -clipped * scored.advantages)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[J]: exp(-d) - 1 + d with d = log π_θ - log π_ref."""
    d = logprobs - reference
    return torch.expm1((-d).clamp(-20, 20)) + d


def value_loss(values: Tensor, scored: Scored, clip: float | None) -> Tensor:
    """[J]: half the squared error, or the larger of it and the one of the clipped value."""
    error = (values - scored.returns) ** 2
    if clip is None:
        return error / 2
    near = scored.values + (values - scored.values).clamp(-clip, clip)
    return torch.maximum(error, (near - scored.returns) ** 2) / 2


def importance_weights(scored: Sequence[Scored], objective: Objective) -> list[Tensor]:
    """[J] of each episode: truncated π_anchor/μ of the token, times that of the sequence (of mean 1 if asked)."""
    log_ratios = [s.anchor - s.behaviour for s in scored]
    weights = [torch.ones_like(ratio) for ratio in log_ratios]
    if objective.token_is_cap is not None:
        weights = [_exp(ratio).clamp(max=objective.token_is_cap) for ratio in log_ratios]
    if objective.sequence_is_cap is not None:
        whole = [float(_exp(ratio.sum()).clamp(max=objective.sequence_is_cap)) for ratio in log_ratios]
        kept = [w for w, ratio in zip(whole, log_ratios, strict=True) if len(ratio)]
        scale = sum(kept) / len(kept) if objective.sequence_is_normalise else 1.0
        weights = [w * share / scale for w, share in zip(weights, whole, strict=True)]
    return weights


def loss_weight(counts: Sequence[int], own: int, rule: str) -> float:
    """Loss weight of a decision of a sequence with `own` of them; `counts` are the decisions of all sequences."""
    if rule == "token_mean":
        return 1 / sum(counts)
    if rule == "sequence_mean":
        return 1 / (sum(1 for count in counts if count) * own)
    raise ValueError(rule)


def actor_loss(
    arch: Architecture, actor: Weights, episodes: Sequence[Episode], scored: Sequence[Scored], objective: Objective
) -> Tensor:
    """The scalar whose gradient the policy follows. Some episode must have a decision."""
    counts = [len(s.behaviour) for s in scored]
    total = torch.zeros((), dtype=torch.float64)
    for episode, s, omega in zip(episodes, scored, importance_weights(scored, objective), strict=True):
        if not len(s.behaviour):
            continue
        logprobs, entropies = read_policy(arch, actor, episode, objective.temperature)
        policy = (
            decoupled_loss(logprobs, s, objective)
            if objective.decoupled
            else ppo_loss(logprobs, s.anchor, s.advantages, objective)
        )
        loss = omega * policy - objective.entropy_coef * entropies
        if s.reference is not None:
            loss = loss + objective.kl_coef * _exp(logprobs - s.behaviour) * k3(logprobs, s.reference)
        total = total + loss_weight(counts, len(loss), objective.aggregation) * loss.sum()
    return total


def critic_loss(
    arch: Architecture, critic: Weights, episodes: Sequence[Episode], scored: Sequence[Scored], objective: Objective
) -> Tensor:
    """The scalar whose gradient the critic follows."""
    counts = [len(s.values) for s in scored]
    total = torch.zeros((), dtype=torch.float64)
    for episode, s in zip(episodes, scored, strict=True):
        if len(s.values):
            loss = value_loss(read_values(arch, critic, episode)[0], s, objective.value_clip)
            total = total + loss_weight(counts, len(loss), objective.aggregation) * loss.sum()
    return total


def _whitened(scored: Sequence[Scored], eps: float) -> list[Scored]:
    every = torch.cat([s.advantages for s in scored])
    mean = every.mean()
    spread = torch.sqrt(((every - mean) ** 2).mean() + eps)
    return [Scored(**{**vars(s), "advantages": (s.advantages - mean) / spread}) for s in scored]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


# --- the step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamW:
    """Optimizer settings."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    undecayed: frozenset[str] = frozenset()
    """Names of weights that do not decay."""
    max_norm: float | None = None


@dataclass
class AdamState:
    """Steps taken and moments by name; empty before the first."""

    step: int = 0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    loss: float
    gradients: Weights
    """Before clipping."""
    norm: float
    """Global, before clipping."""
    weights: Weights
    """After the step, leaves again."""


def gradients_of(loss: Tensor, weights: Weights) -> Weights:
    """d loss / d weight by name, zero where the loss does not depend on it."""
    grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(weights, grads, strict=True))


def clip(gradients: Weights, max_norm: float | None) -> tuple[Weights, float]:
    """g·min(1, c/(‖g‖ + 1e-6)) and ‖g‖ over all of them."""
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return {name: g * factor for name, g in gradients.items()}, norm


def adamw(weights: Weights, gradients: Weights, state: AdamState, settings: AdamW) -> Weights:
    """θ ← θ - lr·wd·θ - lr·m̂/(√v̂ + eps); advances `state`."""
    state.step += 1
    beta1, beta2, after = settings.beta1, settings.beta2, {}
    for name, gradient in gradients.items():
        zero = torch.zeros_like(gradient)
        state.first[name] = beta1 * state.first.get(name, zero) + (1 - beta1) * gradient
        state.second[name] = beta2 * state.second.get(name, zero) + (1 - beta2) * gradient**2
        first = state.first[name] / (1 - beta1**state.step)
        second = state.second[name] / (1 - beta2**state.step)
        decay = 0.0 if name in settings.undecayed else settings.weight_decay
        kept = weights[name].detach() * (1 - settings.lr * decay)
        after[name] = (kept - settings.lr * first / (second.sqrt() + settings.eps)).requires_grad_()
    return after


def optimizer_step(loss: Tensor, weights: Weights, state: AdamState, settings: AdamW) -> Step:
    """Backward, clip, AdamW."""
    gradients = gradients_of(loss, weights)
    clipped, norm = clip(gradients, settings.max_norm)
    return Step(float(loss.detach()), gradients, norm, adamw(weights, clipped, state, settings))


def ewma(z: float, average: Weights, weights: Weights, decay: float) -> tuple[float, Weights]:
    """One tick of Z and θ̄ (2110.00641), from Z_0 = 1 and θ̄_0 = θ_0."""
    new_z = decay * z + 1
    return new_z, {n: (decay * z * average[n].detach() + weights[n].detach()) / new_z for n in weights}


def ppo_step(
    arch: Architecture,
    actor: Weights,
    critic: Weights,
    episodes: Sequence[Episode],
    objective: Objective,
    optimizers: tuple[AdamW, AdamW],
    states: tuple[AdamState, AdamState],
    *,
    anchor: Weights | None,
    reference: Weights | None = None,
) -> tuple[Step, Step] | None:
    """One step of policy and critic on all episodes; None, without any change, if they hold no decision."""
    if not any(len(episode.decisions) for episode in episodes):
        return None
    scored = score(arch, critic, episodes, objective, anchor=anchor, reference=reference)
    policy = actor_loss(arch, actor, episodes, scored, objective)
    value = critic_loss(arch, critic, episodes, scored, objective)
    return (
        optimizer_step(policy, actor, states[0], optimizers[0]),
        optimizer_step(value, critic, states[1], optimizers[1]),
    )
