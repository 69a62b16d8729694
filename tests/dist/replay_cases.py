"""What rank processes do for the replay tests: read and differentiate log-probs under one routing or another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.replay import RouterHandle
from megatron_rl.backend.step import train
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import prepare, sampling_readout, streams
from tests.dist.experiment import read, record_live, start, whole_gradients
from tests.dist.scenario import Layout, Scenario


@dataclass
class Pass:
    """One way of routing: readings and router gradients, and what the registry counted on this rank."""

    logprobs: torch.Tensor
    routers: dict[str, torch.Tensor]
    consumed: tuple[int, int]
    expected: tuple[int, int]
    missing: tuple[float, float]
    """(fallbacks, recorded tokens) over all layers, summed over ranks."""


def live_routes(scenario: Scenario, layout: Layout) -> list[np.ndarray]:
    """Native routes of θ, recorded on one rank."""
    return record_live(start(scenario, layout), scenario.batch)[1]


def compare_routings(scenario: Scenario, layout: Layout, batches: dict[str, RolloutBatch | None]) -> dict[str, Pass]:
    """Read and differentiate under each batch's routes; None routes natively."""
    models = start(scenario, layout)
    return {name: _pass(models, batch or scenario.batch, replay=batch is not None) for name, batch in batches.items()}


def _pass(models: ActorCritic, batch: RolloutBatch, *, replay: bool) -> Pass:
    stream, rows = streams(batch)[0], np.arange(len(batch))
    model = models.actor.model
    logprobs = read(models, models.actor, stream, batch, rows, replay=replay)[0]
    made = prepare(models, model, stream, batch, rows, replay=replay)
    train(model, made.micro_batches, made.plan.length, sampling_readout(models.config), signed_sum)
    consumed = model.registry.consumed
    gradients = whole_gradients(model)
    models.actor.zero_grad()
    calls, again = len(model.registry.handles) * made.plan.count, models.topology.config.recompute == "full"
    counted = sum((handle.missing for handle in model.registry.handles), torch.zeros(2, dtype=torch.float64))
    dist.all_reduce(counted)
    routers = {name: g for name, g in gradients.items() if name.endswith("mlp.gate.weight")}
    return Pass(logprobs, routers, consumed, (calls * (1 + again), calls * again), tuple(counted.tolist()))


def signed_sum(slots: torch.Tensor, readings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ ±log π: signs keep the routers' gradient from being a small difference of large terms."""
    loss = (readings[0] * torch.where(slots % 3 == 0, -1.0, 1.0)).sum()
    return loss, loss.detach().double()[None]


def critic_values(scenario: Scenario, layout: Layout, batches: list[RolloutBatch]) -> list[torch.Tensor]:
    """Values and bootstraps of each batch, read as the score pass does, after an actor forward with its routes."""
    models, found = start(scenario, layout), []
    for batch in batches:
        actor, critic = streams(batch)
        rows = np.arange(len(batch))
        read(models, models.actor, actor, batch, rows)
        found.append(read(models, models.critic, critic, batch, rows, replay=False)[0])
    return found


def routing_maps(scenario: Scenario, layout: Layout) -> list[tuple[int, int]]:
    """(tokens, chosen experts) of every router call of this rank's replayed forward."""
    models, seen = start(scenario, layout), []
    with _watched(models.actor.model.registry.handles, lambda maps: seen.append((len(maps), int(maps.sum())))):
        read(models, models.actor, streams(scenario.batch)[0], scenario.batch, np.arange(len(scenario.batch)))
    return seen


@contextlib.contextmanager
def _watched(handles: list[RouterHandle], see: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    plain = [handle.router.routing for handle in handles]

    def watch(routing):
        def run(*args, **kwargs):
            probabilities, routing_map = routing(*args, **kwargs)
            see(routing_map)
            return probabilities, routing_map

        return run

    for handle in handles:
        handle.router.routing = watch(handle.router.routing)
    try:
        yield
    finally:
        for handle, routing in zip(handles, plain, strict=True):
            handle.router.routing = routing


def with_routes(batch: RolloutBatch, routes: list[np.ndarray]) -> RolloutBatch:
    """The batch with other routes."""
    return replace(batch, routes=tuple(routes))


def other_routes(batch: RolloutBatch, seed: int) -> list[np.ndarray]:
    """Random routes of the same shapes."""
    rng, experts = np.random.default_rng(seed), batch.header.fingerprint.num_experts
    ranks = [rng.random((*ids.shape[:2], experts)).argsort(-1) for ids in batch.routes]
    return [r[..., : ids.shape[2]].astype(ids.dtype) for r, ids in zip(ranks, batch.routes, strict=True)]


def permuted_routes(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Every token gets its neighbour's row."""
    return [np.roll(ids, 1, axis=1) for ids in routes]


def missing_routes(routes: list[np.ndarray]) -> list[np.ndarray]:
    """No row was recorded."""
    return [np.full_like(ids, np.iinfo(ids.dtype).max) for ids in routes]


def altered_token(routes: list[np.ndarray], row: int, token: int) -> list[np.ndarray]:
    """One token of one trajectory goes to other experts in every layer."""
    changed = [ids.copy() for ids in routes]
    changed[row][:, token] = (changed[row][:, token] + 3) % 8
    return changed


def unconsumed_rows(scenario: Scenario, layout: Layout) -> None:
    """A forward that autograd does not record, in training, with no recompute after it."""
    models = start(scenario, layout)
    registry = models.actor.model.registry
    stream, rows = streams(scenario.batch)[0], np.arange(len(scenario.batch))
    (part,) = prepare(models, models.actor.model, stream, scenario.batch, rows, replay=True).micro_batches
    with torch.no_grad(), registry.step(training=True), registry.forward(0, part.router):
        models.actor.model.chunks[0](
            input_ids=part.tokens, position_ids=part.positions, attention_mask=None, packed_seq_params=part.attention
        )


def missed_micro_batch(scenario: Scenario, layout: Layout) -> None:
    """A micro-batch is announced to the registry, and no router is called."""
    registry = start(scenario, layout).actor.model.registry
    with registry.step(training=False), registry.forward(0, None):
        pass


def stray_recompute(scenario: Scenario, layout: Layout) -> None:
    """A router is called in training, outside every forward of ours."""
    registry = start(scenario, layout).actor.model.registry
    with registry.step(training=True):
        registry.handles[0].router(torch.zeros(4, 1, registry.handles[0].router.weight.shape[1]))


def misshapen_rows(scenario: Scenario, layout: Layout) -> None:
    """Routes of one token fewer than the micro-batch has."""
    models = start(scenario, layout)
    registry = models.actor.model.registry
    stream, rows = streams(scenario.batch)[0], np.arange(len(scenario.batch))
    (part,) = prepare(models, models.actor.model, stream, scenario.batch, rows, replay=True).micro_batches
    short = {layer: ids[:-1] for layer, ids in part.router.routes.items()}
    with torch.no_grad(), registry.step(training=False), registry.forward(0, replace(part.router, routes=short)):
        models.actor.model.chunks[0](
            input_ids=part.tokens, position_ids=part.positions, attention_mask=None, packed_seq_params=part.attention
        )
