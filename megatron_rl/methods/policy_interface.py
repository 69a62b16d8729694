"""What a policy loss is: its inputs, its result, and the facts that the rest of the configuration is checked against.

Axis letters: n decisions (of a micro-batch, or of the whole optimizer step where the loss `needs_whole_step`),
B sequences, K turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_rl.methods.registry import Method, class_from_function, kind, options_of

if TYPE_CHECKING:
    from torch import Tensor

Clock = Literal["decision", "turn", "sequence", "group"]
Unit = Literal["decision", "turn", "sequence", "none"]
ANCHORS = frozenset({"recompute", "behaviour", "ewma"})
NO_EWMA = frozenset({"recompute", "behaviour"})
ANY_UNIT: frozenset[Unit] = frozenset({"decision", "turn", "sequence"})
EACH_SEQUENCE_EQUAL = frozenset({"sequence_mean", "prompt_mean"})
"""Aggregations under which a loss that is copied to a sequence's decisions counts once."""


@dataclass(frozen=True)
class Segments:
    """How a step's decisions hang together."""

    offsets: Tensor
    """int64 [B+1] into decisions."""
    turn_offsets: Tensor
    """int64 [K+1] into decisions."""
    groups: Tensor
    """int64 [B]: equal numbers are one group."""
    correct: Tensor | None
    """bool [B]; None where nothing asks."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss is formed from. Only `logprobs` carries gradients."""

    logprobs: Tensor
    """log π_θ, [n]."""
    anchor: Tensor
    """log-probs of the proximal policy, [n]."""
    behaviour: Tensor
    """log μ of the sampler, [n]."""
    advantages: Tensor
    """[n]."""
    ratio_cap: float | None = None
    """Largest π_θ/μ̃ of the decoupled loss; None: the anchor counts as the sampler, or is corrected for by weights."""
    segments: Segments | None = None
    """Of the whole step; None in a micro-batch."""

    @property
    def log_ratio(self) -> Tensor:
        """log π_θ − log π_anchor, [n]."""
        return self.logprobs - self.anchor

    @property
    def whole(self) -> Segments:
        """`segments` of a loss that needs the whole step."""
        if self.segments is None:
            raise RuntimeError("this loss is evaluated on the whole step: needs_whole_step must be true of it")
        return self.segments


@dataclass(frozen=True)
class PolicyTerm:
    """A policy loss, one number a decision."""

    loss: Tensor
    """[n], minimised."""
    clipped_low: Tensor | None = None
    """bool [n]: cut at the lower bound; None: nothing is clipped."""
    clipped_high: Tensor | None = None
    """bool [n]: cut at the upper bound."""
    clipped: tuple[Tensor, Tensor] | None = None
    """(log of the ratio that was clipped, its advantage), [n] each: read by clipping-bias correction."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@kind
class PolicyLossMethod(Method):
    """A policy loss."""

    setting, default = "algorithm.policy", "ppo_clip"
    clock: ClassVar[Clock] = "decision"
    """What has one loss: a decision, a turn, a sequence, or a whole group of sequences."""
    advantages: ClassVar[frozenset[Unit]] = ANY_UNIT
    """Units of advantage it takes: one a decision, a turn, a sequence, or none at all."""
    anchors: ClassVar[frozenset[str]] = ANCHORS
    """Proximal policies it has a use for."""
    decoupled: ClassVar[bool] = False
    """Whether it has a form for an anchor that is neither the sampler nor corrected for (PPO-EWMA)."""
    aggregations: ClassVar[frozenset[str] | None] = None
    """Aggregation rules that count it as it is meant; None: any."""
    default_aggregation: ClassVar[str] = "token_mean"
    """The rule where the configuration names none."""
    importance: ClassVar[bool] = True
    """Whether ω = π_anchor/μ may multiply it; False where the loss corrects by itself or has no sampler."""
    weighted: ClassVar[bool] = True
    """Whether loss weights multiply it; False: it gives each decision's share of the whole loss."""
    bias_correction: ClassVar[bool] = False
    """Whether the update is divided by the norm of what clipping cut away."""

    @property
    def needs_whole_step(self) -> bool:
        """Whether its gradient is formed on the whole step's log-probs: terms of several decisions, or ‖C‖."""
        return self.clock != "decision" or self.bias_correction

    def loss(self, x: PolicyInputs) -> PolicyTerm:
        """The loss of these decisions."""
        raise NotImplementedError

    def contradiction(self, algorithm: Any) -> str | None:
        """Why the rest of `algorithm` (an `AlgorithmConfig`) does not go with this method's options, or None."""
        return None

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> type[Method]:
        """Of `f(x: PolicyInputs, *, options…) → [n] losses or PolicyTerm`: a loss of decisions."""

        def loss(self: PolicyLossMethod, x: PolicyInputs) -> PolicyTerm:
            found = function(x, **options_of(self))
            return found if isinstance(found, PolicyTerm) else PolicyTerm(found)

        return class_from_function(cls, function, loss=loss)
