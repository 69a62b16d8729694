"""Kullback-Leibler estimators from log-probs, and the exact divergence and entropy of unsharded logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.objectives.numerics import LOG_RATIO_LIMIT, bounded_exp, check_same_shape, widen


def estimate(difference: Tensor, estimator: str) -> Tensor:
    """k1 = d, k2 = d²/2 or k3 = expm1(-d) + d of d = log p - log q at samples of p.

    The expectation of k1 and of k3 is KL(p‖q). The exponent of k3 is clamped to ±20, its linear term is not.

    Args:
        difference: d, any shape, nats.
        estimator: "k1", "k2" or "k3".
    Returns:
        The shape of `difference`, at least float32.
    Raises:
        ConfigError: unknown estimator.
    """
    difference = widen(difference)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        return torch.expm1((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + difference
    raise ConfigError(
        "unknown KL estimator", found=estimator, expected="k1, k2 or k3", setting="algorithm.reference_kl.estimator"
    )


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, estimator: str, log_ratio: Tensor | None = None) -> Tensor:
    """KL(π_θ‖π_ref) as a per-decision loss `[D]` whose expected *gradient* under the sampler is that of the divergence.

    d = log π_θ - log π_ref. On samples of π_θ the gradient of k2 has that expectation; the gradient of k1 has
    expectation zero and that of k3 is the gradient of KL(π_ref‖π_θ). k1 and k3 are therefore multiplied by the
    undetached ratio π_θ/μ (of value 1 on-policy), k2 by the detached ratio (off-policy only).

    Args:
        logprobs: log π_θ `[D]`, carries gradients; `reference_logprobs` `[D]` does not.
        log_ratio: log π_θ - log μ `[D]`, undetached. On-policy, `logprobs - logprobs.detach()`. May be None for k2
            only.
    Raises:
        ConfigError: k1 or k3 without a ratio, or an unknown estimator.
    """
    check_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if log_ratio is None:
        if estimator != "k2":
            raise ConfigError(
                f"{estimator} in a loss needs the ratio to the sampler", setting="algorithm.reference_kl.estimator"
            )
        return estimate(widen(logprobs) - widen(reference_logprobs.detach()), estimator)
    check_same_shape(logprobs=logprobs, log_ratio=log_ratio)
    ratio = bounded_exp(log_ratio.detach() if estimator == "k2" else log_ratio)
    return ratio * estimate(widen(logprobs) - widen(reference_logprobs.detach()), estimator)


def categorical_kl(logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(π_θ‖π_ref) over the last axis of unsharded logits, `[..., V]` -> `[...]`, nats; `temperature` divides both.

    A token of probability 0 under π_θ (logit -inf) adds nothing; one of probability 0 under π_ref alone gives +inf.
    """
    check_same_shape(logits=logits, reference_logits=reference_logits)
    log_p = torch.log_softmax(widen(logits) / temperature, dim=-1)
    log_q = torch.log_softmax(widen(reference_logits) / temperature, dim=-1)
    possible = log_p > -torch.inf
    gap = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 0.0)
    return (log_p.exp() * gap).sum(-1)


def categorical_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """-Σ p log p over the last axis of unsharded logits, `[..., V]` -> `[...]`, nats; a logit of -inf adds nothing."""
    log_p = torch.log_softmax(widen(logits) / temperature, dim=-1)
    return -(log_p.exp() * torch.where(log_p > -torch.inf, log_p, 0.0)).sum(-1)


def adaptive_kl_coefficient(coefficient: float, observed_kl: float, target: float, gain: float = 0.1) -> float:
    """β of the next update by a proportional controller (1909.08593): β·(1 + gain·clip(KL/target - 1, ±0.2)).

    A pure function: its caller keeps β and saves it with a checkpoint.

    Args:
        coefficient: β of this update, >= 0.
        observed_kl: KL(π_θ‖π_ref), nats, mean over the global batch. A value that is not finite raises β by the most.
        target: KL to hold, nats.
        gain: in (0, 1]; 0.1 in the paper.
    Raises:
        ConfigError: β is negative, the target not positive, or the gain out of range.
    """
    if coefficient < 0 or target <= 0 or not 0 < gain <= 1:
        raise ConfigError(
            "adaptive KL", found=f"β {coefficient}, target {target}, gain {gain}",
            expected="β >= 0, target > 0, gain in (0, 1]", setting="algorithm.reference_kl.target, .gain",
        )  # fmt: skip
    error = min(max(observed_kl / target - 1, -0.2), 0.2) if math.isfinite(observed_kl) else 0.2
    return coefficient * (1 + gain * error)
