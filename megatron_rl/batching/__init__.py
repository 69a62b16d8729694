"""Positions of tokens: input streams and what is read from them, micro-batch plans, the layout of a micro-batch."""

from __future__ import annotations

from megatron_rl.batching.layout import (
    PAD_SEGMENT,
    PackLayout,
    build_layout,
    context_positions,
    padded_length,
    sequence_slice,
)
from megatron_rl.batching.packing import CostModel, MicroBatchPlan, plan_micro_batches, split_minibatches
from megatron_rl.batching.streams import TokenStream, actor_stream, critic_stream, decision_offsets

__all__ = [
    "PAD_SEGMENT",
    "CostModel",
    "MicroBatchPlan",
    "PackLayout",
    "TokenStream",
    "actor_stream",
    "build_layout",
    "context_positions",
    "critic_stream",
    "decision_offsets",
    "padded_length",
    "plan_micro_batches",
    "sequence_slice",
    "split_minibatches",
]
