"""Forward passes of the trainer: micro-batches of a layout, and their readings back on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.backend.micro_batch import MicroBatch, RouteSpec, prepare_micro_batches
from megatron_rl.backend.model import Model
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.step import Readout, score
from megatron_rl.batching import (
    MicroBatchPlan,
    TokenStream,
    actor_stream,
    critic_stream,
    plan_micro_batches,
)
from megatron_rl.config import RunConfig
from megatron_rl.errors import RouteError
from megatron_rl.reduce import gather_slots
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import ActorCritic


@dataclass(frozen=True)
class PreparedPass:
    """This rank's micro-batches of some trajectories, cut once for any number of forward and backward passes.

    Micro-batches are never written to: every pass arms the model's route registry anew and consumes each row again. The
    optimizer step of a model makes one, for its anchor, whole-step and gradient-norm passes and the step itself.
    """

    stream: TokenStream
    """What the model is fed; its slots number the readings."""
    rows: np.ndarray
    """int64: the trajectories."""
    plan: MicroBatchPlan
    micro_batches: list[MicroBatch]
    """This data rank's, in the order of the plan."""


def sampling_readout(config: RunConfig) -> Readout:
    """How log-probs of a run are read: at the sampling temperature."""
    return Readout(config.rollout.temperature, config.batching.logprob_chunk)


def plan(models: ActorCritic, stream: TokenStream, rows: np.ndarray, *, budget: int | None = None) -> MicroBatchPlan:
    """Micro-batches of these trajectories under the run's layout and token budget."""
    layout, batching = models.topology.config, models.config.batching
    return plan_micro_batches(
        stream.lengths,
        token_budget=budget or batching.token_budget,
        data_ranks=models.topology.dp,
        cp=layout.context,
        tp=layout.tensor,
        cost=models.cost,
        count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        rows=rows,
        pad_each_to=padded_to(models, stream, rows),
    )


def padded_to(models: ActorCritic, stream: TokenStream, rows: np.ndarray) -> int | None:
    """Common padded length of unpacked batching, None when packing."""
    if models.config.batching.packed or not len(rows):
        return None
    multiple = 2 * models.topology.config.context if models.topology.config.context > 1 else 1
    return -(-int(stream.lengths[rows].max()) // multiple) * multiple


def route_spec(model: Model, batch: RolloutBatch | None, *, replay: bool) -> RouteSpec:
    """Recorded routes of this rank's layers; native routing for a critic or when replay is off."""
    hf = model.hf
    layers = {layer: hf.moe_layers.index(layer) for layer in model.registry.layers}

    def recorded(row: int, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
        assert batch is not None, "only recorded rollouts have routes to replay"
        routes = batch.routes[row]
        if routes is None:
            file, line = batch.sources[row]
            raise RouteError(
                "routes are to be replayed but were not recorded", file=file, row=line, setting="replay.enabled=false"
            )
        return routes[indices[:, None], rows]

    return RouteSpec(recorded if replay else None, layers, hf.num_experts, hf.topk)


def prepare(
    models: ActorCritic, model: Model, stream: TokenStream, batch: RolloutBatch | None, rows: np.ndarray,
    *, replay: bool, budget: int | None = None, aux_weight: float | None = None,
) -> PreparedPass:  # fmt: skip
    """Plan a pass over trajectories and cut this rank's micro-batches.

    Args:
        models: layout, token budget and what data ranks are balanced by.
        model: the model that is fed.
        stream: what it is fed.
        batch: where recorded routes come from; may be None without replay.
        rows: int64, the trajectories.
        replay: recorded routes instead of native ones.
        budget: tokens of a micro-batch; None: as configured.
        aux_weight: weight of each recorded token in the router losses; None: the pass has none.
    """
    planned = plan(models, stream, rows, budget=budget)
    routes = route_spec(model, batch, replay=replay)
    padded = padded_to(models, stream, rows)
    parts = prepare_micro_batches(stream, planned, models.topology, routes, pad_each_to=padded, aux_weight=aux_weight)
    return PreparedPass(stream, rows, planned, parts)


def score_slots(
    models: ActorCritic, optimizer: Optimizer, prepared: PreparedPass, readout: Readout | None = None
) -> torch.Tensor:
    """[c, slots] readings of the live weights on every rank, without gradients.

    Args:
        models: the live parts.
        optimizer: of the model that reads.
        prepared: micro-batches made for that model.
        readout: temperature and chunk; None: the run's.
    """
    topology = models.topology
    slots, readings = score(
        optimizer.model, prepared.micro_batches, prepared.plan.length, readout or sampling_readout(models.config)
    )
    return gather_slots(
        slots,
        readings,
        prepared.stream.slots,
        data_group=topology.dp_cp_group,
        pipeline_group=topology.pp_group,
        has_values=topology.last_stage,
    )


def policy_logprobs(
    models: ActorCritic, stream: TokenStream, batch: RolloutBatch | None, rows: np.ndarray,
    *, replay: bool | None = None, budget: int | None = None, readout: Readout | None = None,
) -> torch.Tensor:  # fmt: skip
    """[D] log-probs of the live actor weights for these trajectories, 0 for decisions of others. See `prepare`.

    Args:
        replay: None: as configured.
        readout: temperature and chunk; None: the run's.
    """
    replay = models.config.replay.enabled if replay is None else replay
    prepared = prepare(models, models.actor.model, stream, batch, rows, replay=replay, budget=budget)
    return score_slots(models, models.actor, prepared, readout)[0]


def streams(batch: RolloutBatch) -> tuple[TokenStream, TokenStream]:
    """What actor and critic are fed: the critic's sequences go on to the boundary of a truncation."""
    actor = actor_stream(batch.tokens, batch.offsets, batch.action_mask)
    critic = critic_stream(
        batch.tokens,
        batch.offsets,
        batch.action_mask,
        batch.boundary_tokens,
        batch.boundary_offsets,
        np.asarray(batch.truncated) & np.asarray(batch.boundary_known),
    )
    return actor, critic


def decisions_of(offsets: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """bool [D]: decisions of these trajectories."""
    chosen = torch.zeros(len(offsets) - 1, dtype=torch.bool, device=offsets.device)
    chosen[torch.as_tensor(rows, device=offsets.device)] = True
    return chosen.repeat_interleave(offsets.diff())
