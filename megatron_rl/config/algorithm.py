"""The objective of a run: which methods, and the terms around them. What contradicts is refused here, row by row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, model_validator

from megatron_rl.config.terms import (
    DynamicSamplingConfig,
    OverlongConfig,
    RejectionConfig,
    RouterLossConfig,
    StaleDecisionsConfig,
    ValueConfig,
)
from megatron_rl.methods import (
    AdvantageEstimator,
    AggregationRule,
    Anchor,
    ImportanceCorrection,
    LossKL,
    PolicyLossMethod,
    ReferenceKL,
    RewardKL,
    SteeredKL,
    chosen,
    method_of,
)
from megatron_rl.section import Section


def _default(setting: str, name: str) -> Any:
    """A field's default: the method of this name, with its own defaults."""
    return Field(default_factory=partial(method_of, setting, name))


class AlgorithmConfig(Section):
    """The objective: estimator, policy loss, importance correction, anchor, aggregation, and the terms around them.

    A section with a `name` may be written as the name alone: `policy: gspo` is `policy: {name: gspo}`.
    """

    policy: Annotated[SerializeAsAny[PolicyLossMethod], chosen(PolicyLossMethod)] = _default(
        "algorithm.policy", "ppo_clip"
    )
    """The policy loss and its options."""
    estimator: Annotated[SerializeAsAny[AdvantageEstimator], chosen(AdvantageEstimator)] = _default(
        "algorithm.estimator", "gae"
    )
    """The advantage estimator and its options. It decides whether there is a critic."""
    importance: Annotated[SerializeAsAny[ImportanceCorrection], chosen(ImportanceCorrection)] = _default(
        "algorithm.importance", "none"
    )
    """How decisions are weighed for the distance of their sampler from the anchor."""
    aggregation: Annotated[SerializeAsAny[AggregationRule], chosen(AggregationRule)] | None = None
    """Loss weight of each decision; null: the policy loss's own rule."""
    anchor: Annotated[SerializeAsAny[Anchor], chosen(Anchor)] = _default("algorithm.anchor", "ewma")
    """Proximal policy of the ratio: `ewma`, `recompute` (scored once an iteration) or `behaviour` (the sampler)."""
    reference_kl: Annotated[SerializeAsAny[ReferenceKL], chosen(ReferenceKL)] = _default(
        "algorithm.reference_kl", "none"
    )
    """KL to a frozen reference policy: `none`, in the `loss`, or taken off the `reward`."""
    value: ValueConfig | None = None
    """How the critic learns; null: as `ValueConfig` has it."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per decision (per turn under `turn_gae`: 0.99 in Turn-PPO)."""
    entropy_coef: float = 0.0
    """β_H of the entropy bonus."""
    likelihood_coef: float = Field(0.0, ge=0)
    """Factor of the token-mean −log π of correct trajectories, added to the policy loss (VAPO: 0.1)."""
    correct_return: float | None = None
    """Least return of a correct trajectory (DRPO, VAPO's likelihood term); null: `success` in its metadata."""
    router_losses: RouterLossConfig = Field(default_factory=RouterLossConfig)
    """Load-balancing and z-loss."""

    rejection: RejectionConfig | None = None
    """Remove what is too far from the sampler; null: off."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Remove sequences with any ρ below this; null: off."""
    stale_decisions: StaleDecisionsConfig | None = None
    """Remove what old weights sampled; null: keep it."""
    overlong_penalty: OverlongConfig | None = None
    """Penalty on the reward of long responses; null: off."""
    overlong_filter: bool = False
    """Keep truncated trajectories out of the policy loss; group statistics and the critic still use them."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Drop groups of equal rewards and play others; null: off."""
    missing_boundary: Literal["error", "drop", "zero"] = "error"
    """What to do with truncated trajectories whose boundary is unknown."""

    minibatches: int = Field(1, ge=1)
    """Optimizer steps a rollout batch is split into, per epoch."""
    epochs: int = Field(1, ge=1)
    """M: passes of the actor over a rollout batch."""
    max_skipped_steps: int = Field(16, ge=1)
    """Optimizer steps in a row that may change nothing (no decision left, gradients that are not finite)."""
    information_prompts: int = Field(0, ge=0)
    """Prompts of RAGEN-2's mutual-information diagnostic: its square is the number of extra sequences scored; 0: off.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmConfig:
        for refusal in REFUSALS:
            if reason := refusal.reason(self):
                raise ValueError(reason)
        return self

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is built."""
        return self.estimator.needs_critic

    @property
    def needs_groups(self) -> bool:
        """Whether several responses to a prompt are compared."""
        return self.estimator.needs_groups or self.policy.clock == "group" or self.dynamic_sampling is not None

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of π_ref are scored."""
        return isinstance(self.reference_kl, SteeredKL)

    @property
    def needs_correct(self) -> bool:
        """Whether it matters which trajectories are correct."""
        return self.policy.clock == "group" or self.likelihood_coef > 0

    @property
    def critic(self) -> ValueConfig:
        """`value`, or its defaults."""
        return self.value or ValueConfig()

    @property
    def critic_warmup(self) -> int:
        """Most iterations in which the critic learns alone."""
        return self.critic.warmup.iterations if self.critic.warmup else 0

    @property
    def decision_weights(self) -> AggregationRule:
        """The aggregation rule in force: `aggregation`, or the policy loss's own."""
        return self.aggregation or aggregation_rule(self.policy.default_aggregation)

    @property
    def value_weights(self) -> AggregationRule:
        """The aggregation rule of the critic's loss."""
        own = aggregation_rule("sequence_mean") if self.estimator.unit == "turn" else self.decision_weights
        return self.critic.aggregation or own

    @property
    def kl_loss(self) -> LossKL | None:
        """KL as a loss, where it is one."""
        return self.reference_kl if isinstance(self.reference_kl, LossKL) else None

    @property
    def kl_reward(self) -> RewardKL | None:
        """KL in the reward, where it is there."""
        return self.reference_kl if isinstance(self.reference_kl, RewardKL) else None

    @property
    def kl(self) -> SteeredKL | None:
        """KL to the reference policy, in either place."""
        return self.reference_kl if isinstance(self.reference_kl, SteeredKL) else None

    @property
    def is_decoupled(self) -> bool:
        """Whether the policy loss is in the decoupled form of PPO-EWMA."""
        return self.anchor.name == "ewma" and not self.importance.corrects

    @property
    def ratio_cap(self) -> float | None:
        """Cap of the decoupled loss; None where the loss is not in that form."""
        return getattr(self.anchor, "ratio_cap", None) if self.is_decoupled else None

    @property
    def removes_by_ratio(self) -> bool:
        """Whether decisions are removed for their distance from the sampler."""
        return self.rejection is not None or self.veto is not None

    @property
    def removes(self) -> bool:
        """Whether decisions in play can be taken out of the policy loss."""
        return self.removes_by_ratio or self.overlong_filter or self.stale_decisions is not None

    @property
    def sampling_rounds(self) -> int:
        """Most rounds of play an iteration may take."""
        return self.dynamic_sampling.rounds if self.dynamic_sampling else 1


def aggregation_rule(name: str) -> AggregationRule:
    """The aggregation rule of this name, with its defaults."""
    rule = method_of("algorithm.aggregation", name)
    assert isinstance(rule, AggregationRule)
    return rule


class Refusal(NamedTuple):
    """A contradiction between sections."""

    holds: Callable[[AlgorithmConfig], object]
    why: Callable[[AlgorithmConfig], str]
    """Why, and which setting to change."""

    def reason(self, algorithm: AlgorithmConfig) -> str | None:
        """`why`, or None where there is no contradiction."""
        return self.why(algorithm) if self.holds(algorithm) else None


def _suited(a: AlgorithmConfig) -> str:
    """Estimators that suit the policy loss, in words."""
    estimators = AdvantageEstimator.table.items()
    return " or ".join(name for name, kind in estimators if getattr(kind, "unit", None) in a.policy.advantages)


REFUSALS = (
    Refusal(
        lambda a: a.value is not None and not a.needs_critic,
        lambda a: (
            f"estimator '{a.estimator.name}' has no critic, and value sets one up: set value to null, or estimator to "
            "gae, turn_gae or evpo"
        ),
    ),
    Refusal(
        lambda a: a.estimator.unit not in a.policy.advantages,
        lambda a: (
            f"estimator '{a.estimator.name}' gives one advantage a {a.estimator.unit}, policy '{a.policy.name}' takes "
            f"one a {' or '.join(sorted(a.policy.advantages))}: set estimator to {_suited(a)}, or another policy"
        ),
    ),
    Refusal(
        lambda a: not a.estimator.reads_rewards and (a.kl_reward or a.overlong_penalty),
        lambda a: (
            f"reference_kl 'reward' and overlong_penalty shape the reward, which estimator '{a.estimator.name}' does "
            "not read: set reference_kl to none or loss, and overlong_penalty to null"
        ),
    ),
    Refusal(
        lambda a: a.dynamic_sampling and a.needs_critic,
        lambda a: (
            "dynamic_sampling drops groups that teach a group baseline nothing; a critic learns from them too: set "
            "dynamic_sampling to null, or estimator to a group baseline"
        ),
    ),
    Refusal(
        lambda a: a.anchor.name not in a.policy.anchors,
        lambda a: (
            f"policy '{a.policy.name}' has no use for anchor '{a.anchor.name}': set anchor to "
            + " or ".join(sorted(a.policy.anchors))
        ),
    ),
    Refusal(
        lambda a: a.is_decoupled and not a.policy.decoupled,
        lambda a: (
            f"anchor 'ewma' is not the sampler, and policy '{a.policy.name}' has no decoupled form: set anchor to "
            "recompute, or importance to token or sequence"
        ),
    ),
    Refusal(
        lambda a: a.importance.corrects and not a.policy.importance,
        lambda a: f"policy '{a.policy.name}' takes no importance weights of an anchor: set importance to none",
    ),
    Refusal(
        lambda a: (a.importance.corrects or a.removes_by_ratio) and a.anchor.name == "behaviour",
        lambda a: (
            "with anchor 'behaviour' ρ = π_anchor/μ is 1, there is nothing to correct or reject: set importance to "
            "none, rejection and veto to null, or anchor to recompute"
        ),
    ),
    Refusal(
        lambda a: a.policy.aggregations is not None and a.decision_weights.name not in a.policy.aggregations,
        lambda a: (
            f"policy '{a.policy.name}' has one loss a {a.policy.clock}, which aggregation "
            f"'{a.decision_weights.name}' would count otherwise: set aggregation to "
            + " or ".join(sorted(a.policy.aggregations or ()))
        ),
    ),
    Refusal(lambda a: a.policy.contradiction(a), lambda a: str(a.policy.contradiction(a))),
    Refusal(lambda a: a.estimator.contradiction(a), lambda a: str(a.estimator.contradiction(a))),
)
"""What nested sections cannot rule out: rows in the order in which they are looked at."""
