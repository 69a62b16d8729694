"""Sections of the objective besides its methods: critic, removal, length penalties, dynamic sampling, routers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from megatron_rl.methods import AggregationRule, chosen
from megatron_rl.section import Section


class WarmupConfig(Section):
    """Iterations at the start in which only the critic learns."""

    iterations: int = Field(ge=1)
    """So many; the most there may be where `patience` is set."""
    patience: int | None = Field(None, ge=1)
    """Value pretraining (VC-PPO): returns are Monte-Carlo during the warm-up, which ends once explained variance has
    not risen for this many iterations; null: a fixed number of iterations with the usual returns."""
    gain: float = Field(0.01, ge=0)
    """Least rise of explained variance that counts."""


class ValueConfig(Section):
    """How the critic learns."""

    clip: float | None = Field(None, gt=0)
    """ε_V of value clipping; null: off."""
    aggregation: Annotated[SerializeAsAny[AggregationRule], chosen(AggregationRule)] | None = None
    """Loss weight of each value; null: `algorithm.aggregation`, or for a critic on turns each sequence equal, and each
    turn in it."""
    epochs: int = Field(1, ge=1)
    """K: passes of the critic over a rollout batch (SAO: 2)."""
    warmup: WarmupConfig | None = None
    """Let the critic learn alone at first; null: both learn from the start."""
    freeze_attention: bool = False
    """Train only the critic's MoE and MLP layers, norms and head (SAO)."""


class RejectionConfig(Section):
    """Removes decisions, or whole sequences by their mean or largest estimate, that are too far from the sampler."""

    unit: Literal["token", "sequence_mean", "sequence_max"]
    """What is removed, and by what."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """What is compared, of d = −log ρ."""
    max: float
    """Largest accepted estimate, nats."""
    min: float | None = None
    """Smallest accepted estimate, for k1; null: none."""

    @model_validator(mode="after")
    def _only_k1_is_negative(self) -> RejectionConfig:
        if self.min is not None and self.estimator != "k1":
            raise ValueError("min bounds k1, the only estimate that can be negative: set estimator=k1, or min to null")
        return self


class StaleDecisionsConfig(Section):
    """What happens to decisions that were sampled by old weights."""

    rule: Literal["mask", "drop"]
    """Remove them, or remove their sequences."""
    max_versions: int = Field(ge=0)
    """Weight versions between sampling and training that are accepted."""


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses (2503.14476)."""

    length: int = Field(ge=1)
    """L_max, decisions: from here on the penalty is −1."""
    buffer: int = Field(ge=1)
    """L_c, decisions before `length` over which the penalty falls from 0."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.length:
            raise ValueError(
                f"the penalty falls over buffer decisions up to length: set length to at least {self.buffer}"
            )
        return self


class DynamicSamplingConfig(Section):
    """Drop groups whose rewards are all equal, and play others in their place (DAPO)."""

    rounds: int = Field(3, ge=1)
    """Most rounds of play an iteration may take to find enough informative groups."""


class RouterLossConfig(Section):
    """Losses on the routers' scores, from expert counts of the whole optimizer step: the same in every layout."""

    aux_coef: float = Field(0.0, ge=0)
    """Factor of the load-balancing loss."""
    z_coef: float = Field(0.0, ge=0)
    """Factor of the z-loss."""
