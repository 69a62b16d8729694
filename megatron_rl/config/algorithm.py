"""Optimizers and the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config.section import Section


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay and clipping on the global gradient norm."""

    lr: float = Field(1e-6, ge=0)
    """Largest learning rate, reached after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate falls linearly to `min_lr` after the warm-up; 0: constant."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate after the decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Added to √v̂."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest global gradient norm."""


class AlgorithmConfig(Section):
    """The objective: advantages, losses, importance correction, anchor, aggregation."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per decision."""
    lam_actor: float = Field(0.95, ge=0, le=1)
    """GAE λ of the policy's advantages."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """GAE λ of the critic's returns."""
    whiten: bool = True
    """Whiten advantages over all policy-loss decisions of the rollout batch."""
    clip_low: float = Field(0.2, gt=0)
    """ε_l: ratios below 1 − ε_l are clipped."""
    clip_high: float = Field(0.2, gt=0)
    """ε_h: ratios above 1 + ε_h are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """c of dual clip for negative advantages; null: off."""
    value_clip: float | None = Field(None, gt=0)
    """ε_V of value clipping; null: off."""
    entropy_coef: float = 0.0
    """β_H of the entropy bonus."""
    kl_reward_coef: float = Field(0.0, ge=0)
    """β_KL of KL shaping in the reward; not together with kl_loss_coef."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """β_KL of the KL loss to the reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL loss."""
    anchor: Literal["recompute", "behaviour", "ewma"] = "ewma"
    """Proximal policy of the ratio: recomputed once, the behaviour policy itself, or the EWMA of weights."""
    ewma_decay: float = Field(0.889, ge=0, lt=1)
    """β of the EWMA; centre of mass β/(1−β) optimizer steps."""
    ewma_ratio_cap: float = Field(100.0, gt=1)
    """Largest π_θ/μ̃ of the decoupled EWMA loss."""
    token_is_cap: float | None = Field(None, gt=0)
    """C of truncated token importance weights π_anchor/μ; null: off."""
    sequence_is_cap: float | None = Field(None, gt=0)
    """C_seq of truncated sequence importance weights; null: off."""
    sequence_is_normalise: bool = False
    """Divide sequence weights by their global mean."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant"] = "token_mean"
    """Loss weight of each decision."""
    aggregation_constant: float | None = Field(None, gt=0)
    """C of the `constant` rule."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a rollout batch is split into, per epoch."""
    actor_epochs: int = Field(1, ge=1)
    """M: passes of the actor over a rollout batch."""
    critic_epochs: int = Field(1, ge=1)
    """K: passes of the critic over a rollout batch."""
    critic_warmup: int = Field(0, ge=0)
    """Iterations in which only the critic learns."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Load-balancing loss, from expert counts of the whole optimizer step: linear in tokens, the same in every
    layout."""
    z_loss_coef: float = Field(0.0, ge=0)
    """Router z-loss."""
    missing_boundary: Literal["error", "drop", "zero"] = "error"
    """What to do with truncated trajectories whose boundary is unknown."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmConfig:
        if self.kl_reward_coef > 0 and self.kl_loss_coef > 0:
            raise ValueError("kl_reward_coef and kl_loss_coef are different objectives: set one of them to 0")
        if self.aggregation == "constant" and self.aggregation_constant is None:
            raise ValueError("aggregation 'constant' needs aggregation_constant")
        if self.sequence_is_normalise and self.sequence_is_cap is None:
            raise ValueError("sequence_is_normalise needs sequence_is_cap")
        if self.token_is_cap is not None and self.sequence_is_cap is not None:
            raise ValueError("token_is_cap and sequence_is_cap correct the same bias twice: set one of them to null")
        corrected = self.token_is_cap is not None or self.sequence_is_cap is not None
        if self.dual_clip is not None and self.anchor == "ewma" and not corrected:
            raise ValueError(
                "dual_clip bounds the clipped surrogate, which the decoupled loss of anchor 'ewma' is not: "
                "set dual_clip to null, or token_is_cap or sequence_is_cap"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of π_ref are scored."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0
