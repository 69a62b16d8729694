"""Proximal policies and the KL to a reference policy, by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.methods.registry import Method, kind, register


@kind
class Anchor(Method):
    """The proximal policy of the ratio."""

    setting, default = "algorithm.anchor", "ewma"


@register
class EWMAAnchor(Anchor):
    """The exponentially weighted average of the policy's weights (PPO-EWMA, 2110.00641)."""

    name: Literal["ewma"] = "ewma"
    decay: float = Field(0.889, ge=0, lt=1)
    """β; centre of mass β/(1−β) optimizer steps."""
    ratio_cap: float = Field(100.0, gt=1)
    """Largest π_θ/μ̃ of the decoupled loss."""


@register
class RecomputedAnchor(Anchor):
    """The policy that begins the iteration, scored once by the trainer."""

    name: Literal["recompute"] = "recompute"


@register
class BehaviourAnchor(Anchor):
    """The sampler itself, as recorded."""

    name: Literal["behaviour"] = "behaviour"


@kind
class ReferenceKL(Method):
    """The KL to a frozen reference policy."""

    setting, default = "algorithm.reference_kl", "none"


@register
class NoReferenceKL(ReferenceKL):
    """No reference policy is held."""

    name: Literal["none"] = "none"


class SteeredKL(ReferenceKL):
    """What both places of the KL have in common."""

    coef: float = Field(gt=0)
    """β_KL, where it begins if it is steered."""
    target: float | None = Field(None, gt=0)
    """KL to the reference, nats per token, towards which β_KL is steered once an iteration; null: β_KL stays."""
    gain: float = Field(0.1, gt=0, le=1)
    """Change of β_KL in one iteration per relative distance from `target`, which counts as at most 20 %."""


@register
class LossKL(SteeredKL):
    """A loss on the KL to the reference policy."""

    name: Literal["loss"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""


@register
class RewardKL(SteeredKL):
    """KL to the reference policy taken off the reward of each decision."""

    name: Literal["reward"] = "reward"
