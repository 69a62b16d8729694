"""Readings of a live model on given tokens, outside of any training: what a conversion is verified by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.backend.micro_batch import MicroBatch, RouteSource, RouteSpec, prepare_micro_batches
from megatron_rl.backend.model import Model
from megatron_rl.backend.step import Readout, score
from megatron_rl.batching import CostModel, MicroBatchPlan, TokenStream, actor_stream, plan_micro_batches
from megatron_rl.reduce import gather_slots


@dataclass(frozen=True)
class Probe:
    """Sequences of one length, cut for this rank."""

    stream: TokenStream
    plan: MicroBatchPlan
    parts: list[MicroBatch]


def probe(model: Model, tokens: np.ndarray, *, budget: int | None = None, source: RouteSource | None = None) -> Probe:
    """Cut sequences for this rank; each token but the first of a sequence is predicted.

    Args:
        model: any role.
        tokens: int [B, N].
        budget: tokens of a micro-batch; None: three sequences.
        source: routes to replay; None: routers choose natively.
    """
    place, layout = model.topology, model.topology.config
    count, length = tokens.shape
    predicted = np.ones((count, length), bool)
    predicted[:, 0] = False
    offsets = np.arange(0, count * length + 1, length)
    stream = actor_stream(tokens.astype(np.int32).reshape(-1), offsets, predicted.reshape(-1))
    plan = plan_micro_batches(
        stream.lengths, token_budget=budget or 3 * length, data_ranks=place.dp, cp=layout.context, tp=layout.tensor,
        cost=CostModel(), count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
    )  # fmt: skip
    layers = {layer: model.hf.moe_layers.index(layer) for layer in model.registry.layers}
    routes = RouteSpec(source, layers, model.hf.num_experts, model.hf.topk)
    return Probe(stream, plan, prepare_micro_batches(stream, plan, place, routes))


def next_token_readings(model: Model, tokens: np.ndarray, source: RouteSource | None = None) -> torch.Tensor:
    """Log-prob of each token given those before it, and entropy there. Collective; the same on every rank.

    Args:
        model: a policy; a critic gives one row, its values.
        tokens: int [B, N].
        source: routes to replay; None: routers choose natively.

    Returns:
        float32 [2, B, N - 1], nats.
    """
    cut = probe(model, tokens, source=source)
    slots, readings = score(model, cut.parts, cut.plan.length, Readout())
    place = model.topology
    groups = {"data_group": place.dp_cp_group, "pipeline_group": place.pp_group}
    whole = gather_slots(slots, readings, cut.stream.slots, has_values=place.last_stage, **groups)
    return whole.unflatten(1, (len(tokens), -1))
