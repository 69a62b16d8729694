"""Importance corrections from the sampler to the anchor, by name (spec §9). The mathematics is `objectives.importance`.

A weight of zero does not remove a decision; removal (rejection, veto, staleness) is not a correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_rl.methods.registry import Method, class_from_function, kind, options_of, register

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CorrectionInputs:
    """Whole-step vectors, the same on every rank."""

    log_ratio: Tensor
    """log π_anchor − log μ, [D]; 0 outside the step and where removed."""
    weights: Tensor
    """Loss weights [D]; 0 outside the step and where removed."""
    offsets: Tensor
    """int64 [B+1] into decisions."""
    turn_offsets: Tensor
    """int64 [K+1] into decisions."""


@kind
class ImportanceCorrection(Method):
    """How stale or mismatched data are weighed."""

    setting, default = "algorithm.importance", "none"
    corrects: ClassVar[bool] = True
    """Whether weights ω multiply the policy loss."""

    def weigh(self, x: CorrectionInputs) -> tuple[Tensor, dict[str, float]]:
        """(ω [D], effective sample sizes as shares of tokens, sequences or turns)."""
        raise NotImplementedError

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> type[Method]:
        """Of `f(x: CorrectionInputs, *, options…) → ω [D]` or (ω, metrics)."""

        def weigh(self: ImportanceCorrection, x: CorrectionInputs) -> tuple[Tensor, dict[str, float]]:
            found = function(x, **options_of(self))
            return found if isinstance(found, tuple) else (found, {})

        return class_from_function(cls, function, weigh=weigh)


@register
class NoCorrection(ImportanceCorrection):
    """No weights: the anchor counts as the sampler, or the loss corrects by itself."""

    name: Literal["none"] = "none"
    corrects = False


class _Normalised(ImportanceCorrection):
    """A correction that can normalise its weights."""

    normalise: bool = False
    """Divide weights by their global mean: over sequences, or weighted over decisions."""


class _PerToken(_Normalised):
    """A weight a decision."""

    def omega(self, log_ratio: Tensor) -> Tensor:
        """[D] → [D]."""
        raise NotImplementedError

    def weigh(self, x: CorrectionInputs) -> tuple[Tensor, dict[str, float]]:
        """Each decision its own."""
        from megatron_rl.objectives.importance import ratio, self_normalise, weighted_mean_sums
        from megatron_rl.objectives.numerics import bounded_exp

        omega, counted = self.omega(x.log_ratio), x.weights != 0
        metrics = {
            "is/token_ess": _share(omega, counted),
            "is/token_ess_raw": _share(bounded_exp(x.log_ratio), counted),
        }
        if self.normalise:
            omega = self_normalise(omega, ratio(weighted_mean_sums(omega, x.weights)))
        return omega, metrics


@register
class TokenCorrection(_PerToken):
    """min(ρ, C) of each decision, ρ = π_anchor/μ."""

    name: Literal["token"] = "token"
    cap: float = Field(2.0, gt=0)
    """C."""

    def omega(self, log_ratio: Tensor) -> Tensor:
        """min(ρ, C)."""
        from megatron_rl.objectives.importance import truncated_weights

        return truncated_weights(log_ratio, self.cap)


@register
class IcePop(_PerToken):
    """ρ where α ≤ ρ ≤ β, else 0."""

    name: Literal["icepop"] = "icepop"
    low: float = Field(0.5, gt=0)
    """α."""
    high: float = Field(5.0, gt=0)
    """β."""

    @model_validator(mode="after")
    def _ordered(self) -> IcePop:
        if self.low > self.high:
            raise ValueError("icepop keeps ρ between low and high: set low to at most high, for instance 0.5 and 5")
        return self

    def omega(self, log_ratio: Tensor) -> Tensor:
        """ρ inside the bounds."""
        from megatron_rl.objectives.importance import icepop_weights

        return icepop_weights(log_ratio, self.low, self.high)


class _PerSegment(_Normalised):
    """One weight a sequence or turn: the product of ρ or its geometric mean, truncated; removed decisions do not count
    in either."""

    cap: float = Field(2.0, gt=0)
    """C: weights are at most this."""
    unit: ClassVar[Literal["sequence", "turn"]] = "sequence"

    @property
    def is_mean(self) -> bool:
        """Whether the geometric mean is taken instead of the product."""
        return False

    def weigh(self, x: CorrectionInputs) -> tuple[Tensor, dict[str, float]]:
        """The segment's weight at each of its decisions."""
        from megatron_rl.objectives import importance
        from megatron_rl.objectives.numerics import bounded_exp
        from megatron_rl.objectives.segments import compact, repeat

        offsets = x.turn_offsets if self.unit == "turn" else x.offsets
        positions, cut = compact(x.weights != 0, offsets)
        present, kept = cut.diff() > 0, x.log_ratio.double()[positions]
        if self.is_mean:
            summed = importance.geometric_weights(kept, cut).log()
        else:
            summed = importance.product_log_weights(kept, cut)
        per_segment = importance.truncated_weights(summed, self.cap)
        capped = (per_segment >= self.cap * (1 - 1e-6))[present].double().mean()
        metrics = {
            f"is/{self.unit}_ess": _share(per_segment, present),
            f"is/{self.unit}_ess_raw": _share(bounded_exp(summed), present),
            f"is/{self.unit}_capped": float(capped),
        }
        if self.normalise:
            mean = importance.ratio(importance.weighted_mean_sums(per_segment, present))
            per_segment = importance.self_normalise(per_segment, mean)
        return repeat(per_segment, offsets).float(), metrics


@register
class SequenceCorrection(_PerSegment):
    """min(Πρ, C) over a sequence."""

    name: Literal["sequence"] = "sequence"


@register
class GeometricCorrection(_PerSegment):
    """The geometric mean of ρ over a sequence, at most C."""

    name: Literal["geometric"] = "geometric"

    @property
    def is_mean(self) -> bool:
        """Always."""
        return True


@register
class TurnCorrection(_PerSegment):
    """min(Πρ, C) over a turn, or its geometric mean."""

    name: Literal["turn"] = "turn"
    mean: bool = False
    """The geometric mean of ρ over the turn instead of the product."""
    unit: ClassVar[Literal["sequence", "turn"]] = "turn"

    @property
    def is_mean(self) -> bool:
        """As the option says."""
        return self.mean


def _share(omega: Tensor, counted: Tensor) -> float:
    """ESS/n over what is counted."""
    from megatron_rl.objectives.importance import effective_sample_size, sample_size_sums

    return float(effective_sample_size(sample_size_sums(omega, counted))[1])
