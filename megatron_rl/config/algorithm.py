"""Optimizers and the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config.methods import CRITIC_ADVANTAGES, GROUP_ADVANTAGES, METHODS, Method
from megatron_rl.config.refusals import first_contradiction
from megatron_rl.config.section import Section

Rule = Literal["token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant"]


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
    """The objective: advantages, losses, importance correction, anchor, aggregation. Defaults are those of the papers
    named; null switches a term off."""

    advantage: Literal["gae", "turn_gae", "grpo", "dr_grpo", "rloo", "batch_mean", "evpo", "vpo", "none"] = "gae"
    """Advantage estimator: GAE on decisions or on turns, a group baseline (GRPO, Dr.GRPO, RLOO, VPO's sets of answers),
    the batch's mean reward (REINFORCE), EVPO's choice between critic and batch mean, or none (DRPO). Only `gae`,
    `turn_gae` and `evpo` have a critic; the others build none."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per decision (per turn under `turn_gae`: 0.99 in Turn-PPO)."""
    lam_actor: float = Field(0.95, ge=0, le=1)
    """GAE λ of the policy's advantages (0.9 in Turn-PPO)."""
    lam_alpha: float | None = Field(None, gt=0)
    """α of the length-adaptive λ = 1 − 1/(αJ), which replaces lam_actor (0.05 in VAPO, 1.5 in SAO); null: off."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """GAE λ of the critic's returns."""
    whiten: bool = True
    """Whiten advantages over all policy-loss decisions of the rollout batch."""
    overlong_buffer: int = Field(0, ge=0)
    """L_c of the soft overlong penalty, decisions before overlong_length over which it falls to −1 (DAPO); 0: off."""
    overlong_length: int | None = Field(None, ge=1)
    """L_max, decisions: of the soft overlong penalty, and of DRPO's length weights."""
    overlong_filter: bool = False
    """Keep truncated trajectories out of the policy loss; group statistics and the critic still use them."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and play others in their place (DAPO)."""
    dynamic_sampling_rounds: int = Field(3, ge=1)
    """Most rounds of play an iteration may take to find enough informative groups."""
    correct_return: float | None = None
    """Least return of a correct trajectory (DRPO, VAPO's likelihood term); null: `success` in its metadata."""
    vpo_draws: int = Field(64, ge=1)
    """Dirichlet draws over which VPO averages the best answer of a set, shared by a prompt's rollouts."""

    policy_loss: Literal[
        "ppo_clip", "reinforce", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "dis", "turn_ppo", "turn_is",
        "st_ppo", "s_ppo", "drpo",
    ] = "ppo_clip"  # fmt: skip
    """The policy loss. With anchor `ewma` and no importance weights, `ppo_clip` is PPO-EWMA's decoupled loss."""
    clip_low: float | None = Field(None, gt=0)
    """ε_l: ratios below 1 − ε_l are clipped; null: the paper's (ppo_clip and turn losses 0.2, GSPO 3e-4, DIS 0.3, CISPO
    1, that is no bound)."""
    clip_high: float | None = Field(None, gt=0)
    """ε_h: ratios above 1 + ε_h are clipped; null: the paper's (ppo_clip and turn losses 0.2, GSPO 4e-4, DIS 5; CISPO
    names none and must be told)."""
    dual_clip: float | None = Field(None, gt=1)
    """c of dual clip for negative advantages (3 in its paper); null: off."""
    gmpo_log_clip: float = Field(0.4, gt=0)
    """GMPO's bound on token log-ratios, nats."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """SAPO's τ where the advantage is positive."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """SAPO's τ elsewhere."""
    turn_is_advantage: Literal["mean", "decision"] = "mean"
    """Under `turn_is` and `st_ppo`: the turn's mean advantage, or each decision its own."""
    clipping_bias: Literal["bound", "exact"] = "bound"
    """‖C‖ of `s_ppo` and `st_ppo`: a bound that needs no second backward pass, or the exact norm, which does."""
    drpo_tau: float = Field(10.0, gt=0)
    """DRPO's temperature over incorrect responses."""
    drpo_lam: float = Field(0.1, gt=0)
    """DRPO's λ of length weights over correct responses."""
    drpo_beta: float = Field(1e3, ge=0)
    """DRPO's penalty factor beyond drpo_delta."""
    drpo_delta: float = Field(1e-4, ge=0)
    """KL, nats per token, that DRPO leaves unpunished."""
    likelihood_coef: float = Field(0.0, ge=0)
    """Factor of the token-mean −log π of correct trajectories, added to the policy loss (VAPO: 0.1)."""

    value_clip: float | None = Field(None, gt=0)
    """ε_V of value clipping; null: off."""
    value_aggregation: Rule | None = None
    """Loss weight of each value; null: `aggregation`, and under `turn_gae` each sequence equal, each turn in it equal.
    """
    critic_freeze_attention: bool = False
    """Train only the critic's MoE and MLP layers, norms and head (SAO)."""

    entropy_coef: float = 0.0
    """β_H of the entropy bonus."""
    kl_reward_coef: float = Field(0.0, ge=0)
    """β_KL of KL shaping in the reward; not together with kl_loss_coef."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """β_KL of the KL loss to the reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL loss."""
    kl_target: float | None = Field(None, gt=0)
    """KL to the reference, nats per token, towards which β_KL is steered once an iteration; null: β_KL stays."""
    kl_gain: float = Field(0.1, gt=0, le=1)
    """Change of β_KL in one iteration per relative distance from kl_target, which counts as at most 20 %."""

    anchor: Literal["recompute", "behaviour", "ewma"] = "ewma"
    """Proximal policy of the ratio: recomputed once, the behaviour policy itself, or the EWMA of weights."""
    ewma_decay: float = Field(0.889, ge=0, lt=1)
    """β of the EWMA; centre of mass β/(1−β) optimizer steps."""
    ewma_ratio_cap: float = Field(100.0, gt=1)
    """Largest π_θ/μ̃ of the decoupled EWMA loss."""

    token_is_cap: float | None = Field(None, gt=0)
    """C of truncated token importance weights ρ = π_anchor/μ; null: off."""
    sequence_is_cap: float | None = Field(None, gt=0)
    """C_seq of truncated sequence importance weights Πρ; null: off."""
    geometric_is_cap: float | None = Field(None, gt=0)
    """C of the geometric mean of ρ over a sequence as its weight; null: off."""
    turn_is_cap: float | None = Field(None, gt=0)
    """C of truncated turn importance weights; null: off."""
    turn_is_mean: bool = False
    """Turn importance weights are the geometric mean of ρ over the turn instead of the product."""
    icepop: tuple[float, float] | None = None
    """α, β of IcePop: ρ where α ≤ ρ ≤ β, else 0 (0.5, 5); null: off."""
    is_normalise: bool = False
    """Divide importance weights by their global mean: over sequences, or weighted over decisions."""
    rejection: Literal["token", "sequence_mean", "sequence_max"] | None = None
    """Remove decisions, or sequences by their mean or largest estimate, that are too far from the sampler."""
    rejection_estimator: Literal["k1", "k2", "k3"] = "k3"
    """What is compared, of d = −log ρ."""
    rejection_max: float | None = None
    """Largest accepted estimate, nats."""
    rejection_min: float | None = None
    """Smallest accepted estimate, for k1; null: none."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Remove sequences with any ρ below this; null: off."""
    staleness_rule: Literal["keep", "mask", "drop"] = "keep"
    """What to do with decisions older than max_staleness: keep them, remove them, or remove their sequences."""
    max_staleness: int | None = Field(None, ge=0)
    """Weight versions between sampling and training that the staleness rule accepts."""

    aggregation: Rule = "token_mean"
    """Loss weight of each decision."""
    aggregation_constant: float | None = Field(None, gt=0)
    """C of the `constant` rule (Dr.GRPO: sequences of an optimizer step · L_max)."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a rollout batch is split into, per epoch."""
    actor_epochs: int = Field(1, ge=1)
    """M: passes of the actor over a rollout batch."""
    critic_epochs: int = Field(1, ge=1)
    """K: passes of the critic over a rollout batch (SAO: 2)."""
    critic_warmup: int = Field(0, ge=0)
    """Iterations in which only the critic learns; the most there may be where critic_warmup_patience is set."""
    critic_warmup_patience: int | None = Field(None, ge=1)
    """Value pretraining (VC-PPO): returns are Monte-Carlo during the warm-up, which ends once explained variance has
    not risen for this many iterations; null: a fixed number of iterations with the usual returns."""
    critic_warmup_gain: float = Field(0.01, ge=0)
    """Least rise of explained variance that counts."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Load-balancing loss, from expert counts of the whole optimizer step: linear in tokens, the same in every
    layout."""
    z_loss_coef: float = Field(0.0, ge=0)
    """Router z-loss."""
    missing_boundary: Literal["error", "drop", "zero"] = "error"
    """What to do with truncated trajectories whose boundary is unknown."""
    information_prompts: int = Field(0, ge=0)
    """Prompts of RAGEN-2's mutual-information diagnostic: its square is the number of extra sequences scored; 0: off.
    """

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmConfig:
        reason = first_contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def method(self) -> Method:
        """Facts of the policy loss."""
        return METHODS[self.policy_loss]

    @property
    def clip_range(self) -> tuple[float, float]:
        """ε_l, ε_h: as set, else the paper's; 0.2 where a loss has none."""
        low, high = self.method.clip or (1.0 if self.policy_loss == "cispo" else 0.2, 0.2)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is built."""
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def needs_groups(self) -> bool:
        """Whether several responses to a prompt are compared."""
        return self.advantage in GROUP_ADVANTAGES or self.policy_loss == "drpo" or self.dynamic_sampling

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of π_ref are scored."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0

    @property
    def is_corrected(self) -> bool:
        """Whether importance weights ω multiply the policy loss."""
        caps = (self.token_is_cap, self.sequence_is_cap, self.geometric_is_cap, self.turn_is_cap, self.icepop)
        return any(cap is not None for cap in caps)

    @property
    def is_decoupled(self) -> bool:
        """Whether the policy loss is PPO-EWMA's."""
        return self.anchor == "ewma" and not self.is_corrected

    @property
    def removes_by_ratio(self) -> bool:
        """Whether decisions are removed for their distance from the sampler."""
        return self.rejection is not None or self.veto is not None

    @property
    def removes(self) -> bool:
        """Whether decisions in play can be taken out of the policy loss."""
        return self.removes_by_ratio or self.overlong_filter or self.staleness_rule != "keep"

    @property
    def sampling_rounds(self) -> int:
        """Most rounds of play an iteration may take."""
        return self.dynamic_sampling_rounds if self.dynamic_sampling else 1
