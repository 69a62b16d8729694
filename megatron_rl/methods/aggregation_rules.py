"""Aggregation rules by name: the loss weight of each decision (spec §8). The table is `objectives.aggregation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megatron_rl.methods.registry import Method, class_from_function, kind, options_of, register

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.objectives.aggregation import GlobalCounts


@kind
class AggregationRule(Method):
    """How decisions and sequences are averaged."""

    setting = "algorithm.aggregation"

    def sequence_weights(self, lengths: Tensor, counts: GlobalCounts, prompt_sizes: Tensor) -> Tensor:
        """Weight of each decision of sequence i, float64 [B]; 0 for a sequence without decisions.

        Args:
            lengths: kept decisions J_i, int64 [B].
            counts: of the whole optimizer step.
            prompt_sizes: n_p, int64 [B]: sequences with decisions that share sequence i's prompt.
        """
        from megatron_rl.objectives.aggregation import sequence_weights

        constant = getattr(self, "constant", None)
        return sequence_weights(self.name, lengths, counts, prompt_sizes=prompt_sizes, constant=constant)  # type: ignore[arg-type]

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> type[Method]:
        """Of `f(lengths, counts, prompt_sizes, *, options…) → float64 [B]`."""

        def sequence_weights(
            self: AggregationRule, lengths: Tensor, counts: GlobalCounts, prompt_sizes: Tensor
        ) -> Tensor:
            return function(lengths, counts, prompt_sizes, **options_of(self))

        return class_from_function(cls, function, sequence_weights=sequence_weights)


@register
class TokenMean(AggregationRule):
    """Every decision of the step counts equally: 1/ΣJ."""

    name: Literal["token_mean"] = "token_mean"


@register
class SequenceMean(AggregationRule):
    """Every sequence counts equally, and each decision in it: 1/(B₊ J_i)."""

    name: Literal["sequence_mean"] = "sequence_mean"


@register
class SequenceSumMean(AggregationRule):
    """Decisions are summed over a sequence, sequences averaged: 1/B₊."""

    name: Literal["sequence_sum_mean"] = "sequence_sum_mean"


@register
class PromptMean(AggregationRule):
    """Every prompt counts equally, each of its responses, and each decision in it: 1/(P n_p J_i)."""

    name: Literal["prompt_mean"] = "prompt_mean"


@register
class Constant(AggregationRule):
    """Decisions are summed and divided by a constant: 1/C (Dr.GRPO, 2503.20783)."""

    name: Literal["constant"] = "constant"
    constant: float = Field(gt=0)
    """C (Dr.GRPO: sequences of an optimizer step · longest response)."""
