"""The policy loss of an optimizer step: per decision inside micro-batches, or on the whole step's log-probs.

A loss of a turn, a sequence or a group has terms of several decisions, which packing and context parallelism spread
over micro-batches and ranks. It is evaluated once on log π_θ of the whole step, which every rank holds: c_j =
∂L/∂log π_θ(a_j) comes from automatic differentiation of the pure loss, and the training pass minimises Σ sg(c_j)
log π_θ(a_j). Its gradient is L's, in every layout, without a collective that carries gradients. The price is a scoring
pass where log π_θ is not known already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.config import AlgorithmConfig
from megatron_rl.objectives import groups, policy
from megatron_rl.objectives.diagnostics import extreme_ratio
from megatron_rl.objectives.importance import ratio
from megatron_rl.objectives.policy import PolicyLoss
from megatron_rl.objectives.segments import compact, repeat, segment_mean

BiasNorm = Callable[[torch.Tensor], float]
"""C's coefficients of log π_θ, [D] → ‖C‖ in parameter space."""


@dataclass(frozen=True)
class StepVectors:
    """Constants of one policy step, [D] each; what stands where `weights` is 0 is never read."""

    advantages: torch.Tensor
    behaviour: torch.Tensor
    anchor: torch.Tensor
    reference: torch.Tensor | None
    weights: torch.Tensor
    importance: torch.Tensor | None
    likelihood: torch.Tensor | None = None
    """Weights of the added −log π of correct trajectories."""


@dataclass(frozen=True)
class StepSegments:
    """How a step's decisions hang together."""

    offsets: torch.Tensor
    """int64 [B+1]."""
    turn_offsets: torch.Tensor
    """int64 [K+1]."""
    groups: torch.Tensor
    """int64 [B]."""
    correct: torch.Tensor | None
    """bool [B]."""


@dataclass(frozen=True)
class WholeStepLoss:
    """A policy loss evaluated on the whole step, float32 or bool [D], 0 outside the step."""

    coefficients: torch.Tensor
    """c_j = ∂L/∂log π_θ(a_j)."""
    values: torch.Tensor
    """Decision j's share of L; they sum to it."""
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    metrics: dict[str, float]


def decision_surrogate(
    algorithm: AlgorithmConfig, logprobs: torch.Tensor, vectors: StepVectors, slots: torch.Tensor
) -> PolicyLoss:
    """The policy loss of losses with one term a decision, for the decisions `slots` [n] with log-probs [n]."""
    advantages, anchor = vectors.advantages[slots], vectors.anchor[slots]
    low, high = algorithm.clip_range
    kind, log_ratio = algorithm.policy_loss, logprobs - anchor
    if kind == "reinforce":
        return _unclipped(policy.reinforce(logprobs, advantages))
    if kind == "sapo":
        taus = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
        return _unclipped(policy.sapo(log_ratio, advantages, *taus))
    if kind == "cispo":
        return policy.cispo(log_ratio, logprobs, advantages, clip_high=high, clip_low=low)
    if kind == "dis":
        return policy.dis(log_ratio, logprobs, advantages, low, high)
    if algorithm.is_decoupled:
        return policy.ewma_decoupled(
            logprobs, anchor, vectors.behaviour[slots], advantages, low, high, algorithm.ewma_ratio_cap
        )
    return _with_dual_clip(algorithm, policy.ppo_clip(log_ratio, advantages, low, high), advantages)


def whole_step_loss(
    algorithm: AlgorithmConfig,
    logprobs: torch.Tensor,
    vectors: StepVectors,
    segments: StepSegments,
    exact_bias_norm: BiasNorm | None = None,
) -> WholeStepLoss:
    """Evaluate and differentiate a loss whose terms join several decisions, or whose update ‖C‖ divides.

    Args:
        logprobs: [D] log π_θ before the step.
        vectors, segments: the step; removed decisions have weight 0 and are taken off the timeline first.
        exact_bias_norm: ‖C‖ by a second backward pass; None: the bound that needs none.
    """
    positions, offsets = compact(vectors.weights != 0, segments.offsets)
    leaf = logprobs[positions].double().requires_grad_()
    with torch.enable_grad():
        if algorithm.policy_loss == "drpo":
            result, values, metrics = _drpo(algorithm, leaf, vectors.anchor[positions], segments, offsets)
        else:
            _, turns = compact(vectors.weights != 0, segments.turn_offsets)
            result, log_ratio, advantages = _copied(algorithm, leaf, vectors, positions, offsets, turns)
            values, metrics = _factors(vectors, positions) * result.loss, {}
        (coefficients,) = torch.autograd.grad(values.sum(), leaf)
    if algorithm.method.bias_correction:
        norm = _bias_norm(result, log_ratio, advantages, leaf.detach(), vectors, positions, exact_bias_norm)
        divisor = policy.clipping_bias_divisor(norm)
        coefficients, values = coefficients / divisor, values / divisor
        tails = {f"actor/clip_ratio_extreme{tau}": extreme_ratio(log_ratio.detach(), tau) for tau in (2, 5)}
        metrics |= {"actor/clipping_bias": float(norm)} | {name: float(ratio(sums)) for name, sums in tails.items()}
    place = lambda x: torch.zeros_like(vectors.weights, dtype=x.dtype).index_put((positions,), x)  # noqa: E731
    return WholeStepLoss(
        place(coefficients.float()), place(values.detach().float()), place(result.clipped_low),
        place(result.clipped_high), metrics,
    )  # fmt: skip


def _copied(algorithm: AlgorithmConfig, logprobs: torch.Tensor, vectors: StepVectors, positions, offsets, turns):
    """(loss copied to the decisions [D'], log of the clipped ratio [D'], advantages [D'])."""
    kind, (low, high) = algorithm.policy_loss, algorithm.clip_range
    advantages = vectors.advantages[positions].double()
    log_ratio = logprobs - vectors.anchor[positions].double()
    if kind == "s_ppo":
        return policy.ppo_clip(log_ratio, advantages, low, high), log_ratio, advantages
    if kind == "gspo_token":
        result = policy.gspo_token(log_ratio, advantages, offsets, low, high)
        return _with_dual_clip(algorithm, result, advantages), log_ratio, advantages
    if kind in ("gspo", "gmpo"):
        whole = _first(advantages, offsets)
        if kind == "gmpo":
            result = policy.gmpo(log_ratio, whole, offsets, algorithm.gmpo_log_clip)
            return result._replace(loss=repeat(result.loss, offsets)), log_ratio, advantages
        result = _with_dual_clip(algorithm, policy.gspo(log_ratio, whole, offsets, low, high), whole)
        return _repeated(result, offsets), log_ratio, advantages
    mean = segment_mean(log_ratio, turns)
    if kind != "turn_ppo" and algorithm.turn_is_advantage == "decision":
        result = policy.turn_is_per_decision(log_ratio, advantages, turns, high)
        return _with_dual_clip(algorithm, result, advantages), repeat(mean, turns), advantages
    per_turn = _first(advantages, turns) if kind == "turn_ppo" else segment_mean(advantages, turns)
    loss = policy.turn_ppo if kind == "turn_ppo" else policy.turn_is
    result = _with_dual_clip(algorithm, loss(log_ratio, per_turn, turns, high), per_turn)
    return _repeated(result, turns), repeat(mean, turns), repeat(per_turn, turns)


def _drpo(algorithm: AlgorithmConfig, logprobs: torch.Tensor, anchor: torch.Tensor, segments, offsets):
    """DRPO: (nothing clipped [D'], shares of the loss [D'], metrics)."""
    lengths, rows = offsets.diff(), (offsets.diff() > 0).nonzero().squeeze(-1)
    found = groups.drpo_coefficients(
        segment_mean(logprobs.detach(), offsets)[rows], segments.correct[rows], lengths[rows], segments.groups[rows],
        max_length=algorithm.overlong_length, lam=algorithm.drpo_lam, tau=algorithm.drpo_tau,
    )  # fmt: skip
    per_sequence = torch.zeros(len(lengths), dtype=torch.float64, device=logprobs.device)
    per_sequence[rows] = found.score
    likelihood = policy.drpo(logprobs, per_sequence, lengths, offsets) / found.prompts
    divergence = (anchor.double() - logprobs) / len(logprobs)
    factor = groups.drpo_kl_coefficient(divergence.detach().sum(), algorithm.drpo_beta, algorithm.drpo_delta)
    metrics = {"actor/drpo_kl": float(divergence.detach().sum()), "actor/drpo_objective": float(found.objective.mean())}
    return _unclipped(likelihood.detach()), likelihood + factor * divergence, metrics


def _bias_norm(
    result: PolicyLoss, log_ratio, advantages, logprobs, vectors: StepVectors, positions, exact: BiasNorm | None
) -> torch.Tensor:
    """‖C‖ of the clipping-bias correction, float64 scalar."""
    weights = _factors(vectors, positions)
    if exact is None:
        return policy.clipping_bias_bound(result, log_ratio.detach(), advantages, logprobs, weights)
    leaf = logprobs.clone().requires_grad_()
    with torch.enable_grad():
        surrogate = policy.clipping_bias_surrogate(result, log_ratio.detach(), advantages, leaf)
        (coefficients,) = torch.autograd.grad((weights * surrogate).sum(), leaf)
    whole = torch.zeros_like(vectors.weights).index_put((positions,), coefficients.float())
    return torch.tensor(exact(whole), dtype=torch.float64, device=logprobs.device)


def _factors(vectors: StepVectors, positions: torch.Tensor) -> torch.Tensor:
    """w ω of the kept decisions, float64."""
    weights = vectors.weights[positions].double()
    return weights if vectors.importance is None else weights * vectors.importance[positions].double()


def _with_dual_clip(algorithm: AlgorithmConfig, result: PolicyLoss, advantages: torch.Tensor) -> PolicyLoss:
    return result if algorithm.dual_clip is None else policy.dual_clip(result, advantages, algorithm.dual_clip)


def _repeated(result: PolicyLoss, offsets: torch.Tensor) -> PolicyLoss:
    return PolicyLoss(*(repeat(part, offsets) for part in result))


def _unclipped(loss: torch.Tensor) -> PolicyLoss:
    never = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyLoss(loss, never, never)


def _first(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The first entry of each segment, 0 of an empty one: the value of segments whose entries are all the same."""
    starts = offsets[:-1].clamp(max=max(len(values) - 1, 0))
    return torch.where(offsets.diff() > 0, values[starts], 0.0)
