"""Policy losses by name: the mathematics of `objectives.policy`, each joined to its options and facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from megatron_rl.methods.policy_interface import (
    ANY_UNIT,
    EACH_SEQUENCE_EQUAL,
    NO_EWMA,
    PolicyInputs,
    PolicyLossMethod,
    PolicyTerm,
    Unit,
)
from megatron_rl.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.objectives.policy import PolicyLoss


class _DualClipped(PolicyLossMethod):
    """A loss that is unbounded where a negative advantage meets a large ratio."""

    dual_clip: float | None = Field(None, gt=1)
    """c of dual clip, which bounds the loss at negative advantages by c|A| (3 in 1912.09729); null: off."""

    def _bounded(self, found: PolicyLoss, advantages: Tensor) -> PolicyLoss:
        from megatron_rl.objectives.policy import dual_clip

        return found if self.dual_clip is None else dual_clip(found, advantages, self.dual_clip)


class _Clipped(_DualClipped):
    """A loss that clips the ratio to [1 − ε_l, 1 + ε_h]."""

    clip_low: float = Field(0.2, gt=0)
    """ε_l: ratios below 1 − ε_l are clipped."""
    clip_high: float = Field(0.2, gt=0)
    """ε_h: ratios above 1 + ε_h are clipped (0.28: DAPO's Clip-Higher)."""


@register
class PPOClip(_Clipped):
    """PPO's clipped surrogate (1707.06347); with anchor `ewma` and no importance weights PPO-EWMA's decoupled loss."""

    name: Literal["ppo_clip"] = "ppo_clip"
    decoupled = True

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives import policy

        if x.ratio_cap is not None:
            bounds = self.clip_low, self.clip_high, x.ratio_cap
            return _term(policy.ewma_decoupled(x.logprobs, x.anchor, x.behaviour, x.advantages, *bounds))
        found = policy.ppo_clip(x.log_ratio, x.advantages, self.clip_low, self.clip_high)
        return _term(self._bounded(found, x.advantages))

    def contradiction(self, algorithm: Any) -> str | None:
        """Dual clip has nothing to bound in the decoupled form."""
        if self.dual_clip is None or not algorithm.is_decoupled:
            return None
        return (
            "dual_clip bounds the clipped surrogate, which the decoupled loss of anchor 'ewma' is not: set "
            "policy.dual_clip to null, or importance to token or sequence"
        )


@register
class Reinforce(PolicyLossMethod):
    """−A log π_θ (Williams 1992)."""

    name: Literal["reinforce"] = "reinforce"
    anchors = NO_EWMA

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives.policy import reinforce

        return PolicyTerm(reinforce(x.logprobs, x.advantages))


@register
class GSPO(_DualClipped):
    """One ratio a sequence, the geometric mean of its tokens' (2507.18071)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0)
    """ε_l of the sequence ratio."""
    clip_high: float = Field(4e-4, gt=0)
    """ε_h of the sequence ratio."""
    clock = "sequence"
    advantages = frozenset({"sequence"})
    aggregations, default_aggregation = EACH_SEQUENCE_EQUAL, "sequence_mean"

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """The sequence's loss, copied to its decisions."""
        from megatron_rl.objectives.policy import gspo

        offsets = x.whole.offsets
        whole = _first(x.advantages, offsets)
        found = self._bounded(gspo(x.log_ratio, whole, offsets, self.clip_low, self.clip_high), whole)
        return _term(_copied(found, offsets))


@register
class GSPOToken(GSPO):
    """GSPO with an advantage per decision: the ratio's value is the sequence's, its gradient the decision's own."""

    name: Literal["gspo_token"] = "gspo_token"  # type: ignore[assignment]
    advantages = ANY_UNIT

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives.policy import gspo_token

        found = gspo_token(x.log_ratio, x.advantages, x.whole.offsets, self.clip_low, self.clip_high)
        return _term(self._bounded(found, x.advantages))


@register
class GMPO(PolicyLossMethod):
    """Geometric mean of token ratios that are clipped one by one (2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    log_clip: float = Field(0.4, gt=0)
    """Bound on token log-ratios, nats."""
    clock = "sequence"
    advantages = frozenset({"sequence"})
    aggregations, default_aggregation = EACH_SEQUENCE_EQUAL, "sequence_mean"

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """The sequence's loss, copied to its decisions; clip masks are the decisions' own."""
        from megatron_rl.objectives.policy import gmpo
        from megatron_rl.objectives.segments import repeat

        offsets = x.whole.offsets
        found = gmpo(x.log_ratio, _first(x.advantages, offsets), offsets, self.log_clip)
        return _term(found._replace(loss=repeat(found.loss, offsets)))


@register
class CISPO(PolicyLossMethod):
    """REINFORCE with a clipped, detached ratio as weight (2506.13585)."""

    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0)
    """ε_l of the weight; 1: no lower bound, as in the paper."""
    clip_high: float = Field(gt=0)
    """ε_h of the weight; the paper names none, so there is no default."""

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision; the masks say where the weight was clipped, no gradient is cut."""
        from megatron_rl.objectives.policy import cispo

        bounds = dict(clip_high=self.clip_high, clip_low=self.clip_low)
        return _term(cispo(x.log_ratio, x.logprobs, x.advantages, **bounds))


@register
class SAPO(PolicyLossMethod):
    """A sigmoid around ratio 1 in place of a hard clip (2511.20347)."""

    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """τ where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """τ elsewhere."""

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives.policy import sapo

        return PolicyTerm(sapo(x.log_ratio, x.advantages, self.tau_positive, self.tau_negative))


@register
class DIS(PolicyLossMethod):
    """Double-sided importance sampling to the behaviour policy, masked outside its bounds (SAO, 2607.07508)."""

    name: Literal["dis"] = "dis"
    clip_low: float = Field(0.3, gt=0)
    """Decisions with a ratio of 1 − ε_l or less have no loss."""
    clip_high: float = Field(5.0, gt=0)
    """Decisions with a ratio of 1 + ε_h or more have no loss."""
    anchors, importance = frozenset({"behaviour"}), False

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives.policy import dis

        return _term(dis(x.log_ratio, x.logprobs, x.advantages, self.clip_low, self.clip_high))


class _TurnLoss(_DualClipped):
    """A loss with one ratio a turn, clipped by one ε on both sides."""

    clip: float = Field(0.2, gt=0)
    """ε: turn ratios outside [1 − ε, 1 + ε] are clipped."""
    clock = "turn"


@register
class TurnPPO(_TurnLoss):
    """PPO clipping of the product of a turn's ratios, with the advantage of a turn critic (2512.17008)."""

    name: Literal["turn_ppo"] = "turn_ppo"
    advantages = frozenset({"turn", "sequence"})

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """The turn's loss, copied to its decisions."""
        from megatron_rl.objectives.policy import turn_ppo

        turns = x.whole.turn_offsets
        per_turn = _first(x.advantages, turns)
        return _term(_copied(self._bounded(turn_ppo(x.log_ratio, per_turn, turns, self.clip), per_turn), turns))


@register
class TurnIS(_TurnLoss):
    """PPO clipping of the geometric mean of a turn's ratios (the "Turn-PPO" of 2511.20718)."""

    name: Literal["turn_is"] = "turn_is"
    advantage: Literal["mean", "decision"] = "mean"
    """The turn's mean advantage, or each decision its own."""

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """The turn's loss copied to its decisions, or one a decision at the turn's ratio."""
        from megatron_rl.objectives import policy
        from megatron_rl.objectives.segments import repeat, segment_mean

        turns, log_ratio = x.whole.turn_offsets, x.log_ratio
        mean = repeat(segment_mean(log_ratio, turns), turns)
        if self.advantage == "decision":
            found = policy.turn_is_per_decision(log_ratio, x.advantages, turns, self.clip)
            return _term(self._bounded(found, x.advantages), (mean, x.advantages))
        per_turn = segment_mean(x.advantages, turns)
        found = self._bounded(policy.turn_is(log_ratio, per_turn, turns, self.clip), per_turn)
        return _term(_copied(found, turns), (mean, repeat(per_turn, turns)))


class _BiasCorrected(PolicyLossMethod):
    """A loss whose update is divided by ‖C‖, the norm of the gradient that clipping cut away."""

    clipping_bias: Literal["bound", "exact"] = "bound"
    """‖C‖: a bound that needs no second backward pass, or the exact norm, which does."""
    bias_correction = True


@register
class STPPO(_BiasCorrected, TurnIS):
    """`turn_is` with clipping-bias correction (2511.20718)."""

    name: Literal["st_ppo"] = "st_ppo"  # type: ignore[assignment]


@register
class SPPO(_BiasCorrected, _Clipped):
    """`ppo_clip` with clipping-bias correction (2511.20718)."""

    name: Literal["s_ppo"] = "s_ppo"

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """One term a decision."""
        from megatron_rl.objectives.policy import ppo_clip

        found = ppo_clip(x.log_ratio, x.advantages, self.clip_low, self.clip_high)
        return _term(self._bounded(found, x.advantages), (x.log_ratio, x.advantages))


@register
class DRPO(PolicyLossMethod):
    """Correct responses of a group against its incorrect ones, weighted by length (2510.04474); needs no advantages."""

    name: Literal["drpo"] = "drpo"
    max_length: int = Field(ge=1)
    """L_max of the length weights: the longest response allowed, decisions."""
    tau: float = Field(10.0, gt=0)
    """Temperature over incorrect responses."""
    lam: float = Field(0.1, gt=0)
    """λ of length weights over correct responses."""
    beta: float = Field(1e3, ge=0)
    """Penalty factor of the KL beyond `delta`."""
    delta: float = Field(1e-4, ge=0)
    """KL, nats per token, that is left unpunished."""
    clock, weighted, importance = "group", False, False
    advantages: ClassVar[frozenset[Unit]] = frozenset({"none"})
    anchors = NO_EWMA
    aggregations, default_aggregation = frozenset({"prompt_mean"}), "prompt_mean"

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """Each decision's share of the loss, which the number of prompts already divides."""
        import torch

        from megatron_rl.objectives import groups, policy
        from megatron_rl.objectives.segments import segment_mean

        whole, offsets = x.whole, x.whole.offsets
        if whole.correct is None:
            raise RuntimeError("DRPO needs to know which responses are correct")
        lengths, rows = offsets.diff(), (offsets.diff() > 0).nonzero().squeeze(-1)
        found = groups.drpo_coefficients(
            segment_mean(x.logprobs.detach(), offsets)[rows], whole.correct[rows], lengths[rows], whole.groups[rows],
            max_length=self.max_length, lam=self.lam, tau=self.tau,
        )  # fmt: skip
        per_sequence = torch.zeros(len(lengths), dtype=torch.float64, device=x.logprobs.device)
        per_sequence[rows] = found.score
        likelihood = policy.drpo(x.logprobs, per_sequence, lengths, offsets) / found.prompts
        divergence = (x.anchor - x.logprobs) / len(x.logprobs)
        kl = divergence.detach().sum()
        factor = groups.drpo_kl_coefficient(kl, self.beta, self.delta)
        metrics = {"actor/drpo_kl": float(kl), "actor/drpo_objective": float(found.objective.mean())}
        return PolicyTerm(likelihood + factor * divergence, metrics=metrics)


def _term(found: PolicyLoss, clipped: tuple[Tensor, Tensor] | None = None) -> PolicyTerm:
    return PolicyTerm(found.loss, found.clipped_low, found.clipped_high, clipped)


def _copied(found: PolicyLoss, offsets: Tensor) -> PolicyLoss:
    """A segment's loss and masks at each of its decisions."""
    from megatron_rl.objectives.segments import repeat

    return type(found)(*(repeat(part, offsets) for part in found))


def _first(values: Tensor, offsets: Tensor) -> Tensor:
    """The first entry of each segment, 0 of an empty one: the value of segments whose entries are all the same."""
    import torch

    starts = offsets[:-1].clamp(max=max(len(values) - 1, 0))
    return torch.where(offsets.diff() > 0, values[starts], 0.0)
