"""A policy loss whose terms join several decisions, evaluated on the log-probs of the whole optimizer step.

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

from megatron_rl.methods import PolicyInputs, PolicyLossMethod, PolicyTerm, Segments
from megatron_rl.objectives import policy
from megatron_rl.objectives.diagnostics import extreme_ratio
from megatron_rl.objectives.importance import ratio
from megatron_rl.objectives.policy import PolicyLoss
from megatron_rl.objectives.segments import compact

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
class WholeStepLoss:
    """A policy loss evaluated on the whole step, float32 or bool [D], 0 outside the step."""

    coefficients: torch.Tensor
    """c_j = ∂L/∂log π_θ(a_j)."""
    values: torch.Tensor
    """Decision j's share of L; they sum to it."""
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    metrics: dict[str, float]


def whole_step_loss(
    method: PolicyLossMethod,
    logprobs: torch.Tensor,
    vectors: StepVectors,
    segments: Segments,
    exact_bias_norm: BiasNorm | None = None,
) -> WholeStepLoss:
    """Evaluate and differentiate a loss whose terms join several decisions, or whose update ‖C‖ divides.

    Args:
        method: the policy loss.
        logprobs: [D] log π_θ before the step.
        vectors, segments: the step; removed decisions have weight 0 and are taken off the timeline first.
        exact_bias_norm: ‖C‖ by a second backward pass; None: the bound that needs none.
    """
    counted = vectors.weights != 0
    positions, offsets = compact(counted, segments.offsets)
    _, turns = compact(counted, segments.turn_offsets)
    leaf = logprobs[positions].double().requires_grad_()
    anchor, behaviour, advantages = (
        x[positions].double() for x in (vectors.anchor, vectors.behaviour, vectors.advantages)
    )
    kept = Segments(offsets, turns, segments.groups, segments.correct)
    with torch.enable_grad():
        term = method.loss(PolicyInputs(leaf, anchor, behaviour, advantages, segments=kept))
        values = _factors(vectors, positions) * term.loss if method.weighted else term.loss
        (coefficients,) = torch.autograd.grad(values.sum(), leaf)
    metrics = dict(term.metrics)
    if method.bias_correction:
        norm = _bias_norm(term, leaf.detach(), vectors, positions, exact_bias_norm)
        divisor = policy.clipping_bias_divisor(norm)
        coefficients, values = coefficients / divisor, values / divisor
        log_ratio = _clipped(term)[0].detach()
        tails = {f"actor/clip_ratio_extreme{tau}": extreme_ratio(log_ratio, tau) for tau in (2, 5)}
        metrics |= {"actor/clipping_bias": float(norm)} | {name: float(ratio(sums)) for name, sums in tails.items()}
    place = lambda x: torch.zeros_like(vectors.weights, dtype=x.dtype).index_put((positions,), x)  # noqa: E731
    low, high = masks(term)
    return WholeStepLoss(place(coefficients.float()), place(values.detach().float()), place(low), place(high), metrics)


def masks(term: PolicyTerm) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip masks of a term, all False where nothing is clipped."""
    never = torch.zeros_like(term.loss, dtype=torch.bool)
    return (
        never if term.clipped_low is None else term.clipped_low,
        never if term.clipped_high is None else term.clipped_high,
    )


def _clipped(term: PolicyTerm) -> tuple[torch.Tensor, torch.Tensor]:
    if term.clipped is None:
        raise RuntimeError("clipping-bias correction needs to know which ratio was clipped: set PolicyTerm.clipped")
    return term.clipped


def _bias_norm(
    term: PolicyTerm, logprobs: torch.Tensor, vectors: StepVectors, positions: torch.Tensor, exact: BiasNorm | None
) -> torch.Tensor:
    """‖C‖ of the clipping-bias correction, float64 scalar."""
    weights, (log_ratio, advantages) = _factors(vectors, positions), _clipped(term)
    result = PolicyLoss(term.loss, *masks(term))
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
