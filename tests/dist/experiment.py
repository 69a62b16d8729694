"""What rank processes do: build a scenario's models under a layout, take two optimizer steps, hand back everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron_rl.backend import step
from megatron_rl.backend.anchor import main_weights
from megatron_rl.backend.model import Model
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.parameters import local_parameters
from megatron_rl.backend.topology import initialize
from megatron_rl.backend.weights import export_hf, import_hf
from megatron_rl.batching import TokenStream, build_layout
from megatron_rl.hf.config import read_hf_config
from megatron_rl.reduce import gather_slots
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import ActorCritic, build_actor_critic
from megatron_rl.training.forward import plan, prepare, sampling_readout, streams
from megatron_rl.training.records import ScoredBatch
from megatron_rl.training.score import score_batch
from megatron_rl.training.update import update_actor, update_critic
from tests.dist.scenario import EMPTY_ROW, SECOND_STEP, Layout, Scenario, decision_order, reordered, shuffle_order

Weights = dict[str, torch.Tensor]


@dataclass
class Result:
    """All that a layout produced; `steps` has one entry per optimizer step. Whole tensors on rank 0 only."""

    scored: dict[str, torch.Tensor]
    """advantages and returns [D] of the score pass."""
    metrics: dict[str, float]
    """Of the score pass."""
    steps: list[StepResult] = field(default_factory=list)


@dataclass
class StepResult:
    """One optimizer step of actor and critic, decisions in the order of the original batch."""

    readings: dict[str, torch.Tensor]
    """Before the step, [D]: log-probs under θ, θ̄ and the reference, values."""
    margin: float
    """Smallest gap between the last chosen expert and the next, over all readings."""
    metrics: dict[str, float]
    gradients: dict[str, Weights]
    """By model, before clipping."""
    weights: dict[str, Weights]
    """By model and `ewma`, after the step."""
    z: float


def start(scenario: Scenario, layout: Layout) -> ActorCritic:
    """ActorCritic at the experiment's starting point: θ̄, θ and π_ref apart, the critic still the one that scores."""
    config = scenario.config(layout)
    models = build_actor_critic(config, initialize(config.parallel, seed=1))
    if models.anchor is not None:
        load(models.actor, scenario.checkpoints["anchor"])
        models.anchor.restart()
    load(models.actor, scenario.checkpoints["actor"])
    return models


def load(optimizer: Optimizer, path: str) -> None:
    """Replace a live model's weights."""
    import_hf(optimizer.model, path, read_hf_config(path))
    optimizer.megatron.reload_model_params()


def two_steps(scenario: Scenario, layout: Layout) -> Result:
    """Score the batch, then update actor and critic on all trajectories, then on SECOND_STEP."""
    models = start(scenario, layout)
    order = shuffle_order(len(scenario.batch)) if layout.shuffled else np.arange(len(scenario.batch))
    decisions = torch.as_tensor(decision_order(scenario.batch, order))
    scored = score(models, scenario, reordered(scenario.batch, order))
    found = {name: getattr(scored, name) for name in ("advantages", "returns", "values")}
    result = Result(
        {name: _restored(values, decisions) for name, values in found.items() if values is not None}, scored.metrics
    )
    where = np.argsort(order)
    for rows in (np.sort(where[np.isin(order[where], order[scored.rows])]), where[list(SECOND_STEP)]):
        result.steps.append(_one_step(models, scored, rows, decisions))
    return result if dist.get_rank() == 0 else Result({}, result.metrics, [_small(found) for found in result.steps])


def score(models: ActorCritic, scenario: Scenario, batch: RolloutBatch) -> ScoredBatch:
    """Score with old weights, then go on with the new ones: an anchor scored once is not θ either."""
    once = models.config.algorithm.anchor.name == "recompute"
    if once:
        load(models.actor, scenario.checkpoints["anchor"])
    scored = score_batch(models, batch)
    if models.critic is not None:
        load(models.critic, scenario.checkpoints["critic"])
    if not once:
        return scored
    load(models.actor, scenario.checkpoints["actor"])
    return replace(scored, actor_steps=-1)


def _small(found: StepResult) -> StepResult:
    """What ranks other than 0 hand back: numbers that must be the same everywhere."""
    return StepResult({}, found.margin, found.metrics, {}, {}, found.z)


def _restored(values: torch.Tensor, decisions: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values).index_copy(0, decisions, values)


def _one_step(models: ActorCritic, scored: ScoredBatch, rows: np.ndarray, decisions: torch.Tensor) -> StepResult:
    readings, margin = read_all(models, scored, rows)
    gradients: dict[str, Weights] = {}
    metrics: dict[str, float] = {}
    for name, (optimizer, update) in _updates(models).items():
        with capture(optimizer, gradients, name):
            metrics |= update(models, scored, rows)
        check_consumed(models, optimizer.model, metrics[f"{name}/micro_batches"])
    weights = {name: whole(optimizer.model) for name, (optimizer, _) in _updates(models).items()}
    if models.anchor is not None:
        with models.anchor.swapped_in():
            weights["ewma"] = whole(models.actor.model)
    restored = {name: _restored(values, decisions) for name, values in readings.items()}
    return StepResult(restored, margin, metrics, gradients, weights, models.anchor.z if models.anchor else 0.0)


def _updates(models: ActorCritic) -> dict[str, tuple[Optimizer, Callable[..., dict[str, float]]]]:
    actor = {"actor": (models.actor, update_actor)}
    return actor if models.critic is None else {**actor, "critic": (models.critic, update_critic)}


def read_all(models: ActorCritic, scored: ScoredBatch, rows: np.ndarray) -> tuple[dict[str, torch.Tensor], float]:
    """Log-probs under every policy and values of the live critic, [D], and the smallest router margin met."""
    found, margins = {}, []
    policies = {"theta": contextlib.nullcontext()}
    if models.anchor is not None:
        policies["anchor"] = models.anchor.swapped_in()
    if models.reference is not None:
        policies["reference"] = models.reference.swapped_in()
    before = [main.detach().clone() for main in main_weights(models.actor)]
    for name, context in policies.items():
        with context:
            found[name] = read(models, models.actor, scored.actor, scored.batch, rows)[0]
            margins.append(_margin(models.actor.model))
    for saved, main in zip(before, main_weights(models.actor), strict=True):
        assert torch.equal(saved, main), "swapping weights in and out changed them"
    if models.critic is not None:
        critic = read(models, models.critic, scored.critic, scored.batch, rows, replay=False)[0]
        margins.append(_margin(models.critic.model))
        found["values"] = critic[: len(scored.values)]
    return found, min(margins)


def _margin(model: Model) -> float:
    smallest = torch.stack([handle.margin for handle in model.registry.handles] or [torch.tensor(torch.inf)]).min()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return float(smallest)


def read(models: ActorCritic, optimizer: Optimizer, stream: TokenStream, batch, rows, *, replay=None) -> torch.Tensor:
    """[c, slots] readings of the live weights on every rank; routers record what they chose."""
    topology = models.topology
    replay = models.config.replay.enabled if replay is None else replay
    made, how = prepare(models, optimizer.model, stream, batch, rows, replay=replay), sampling_readout(models.config)
    slots, values = step.score(optimizer.model, made.micro_batches, made.plan.length, how, record=True)
    groups = dict(data_group=topology.dp_cp_group, pipeline_group=topology.pp_group, has_values=topology.last_stage)
    return gather_slots(slots, values, stream.slots, **groups)


def check_consumed(models: ActorCritic, model: Model, micro_batches: float) -> None:
    """Router calls = layers × micro-batches × (1 + recomputed)."""
    expected, again = len(model.registry.handles) * int(micro_batches), models.topology.config.recompute == "full"
    assert model.registry.consumed == (expected * (1 + again), expected * again), model.registry.consumed


@contextlib.contextmanager
def capture(optimizer: Optimizer, into: dict[str, Weights], name: str) -> Iterator[None]:
    """Keep whole gradients, as the next optimizer step finds them."""
    plain = optimizer.step

    def stepping() -> tuple[bool, float]:
        into[name] = whole_gradients(optimizer.model)
        return plain()

    optimizer.step = stepping
    try:
        yield
    finally:
        del optimizer.step


def whole(model: Model) -> Weights:
    """Every HF tensor of the live weights, float32."""
    return {name: tensor.float().clone() for name, tensor in export_hf(model)}


def whole_gradients(model: Model) -> Weights:
    """Every HF tensor of the reduced gradient, float32. Optimizer shards are gathered first."""
    if model.topology.config.distributed_optimizer:
        for chunk in model.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                for bucket in buffer.buckets:
                    shards = shard_buffer(bucket.grad_data, buffer.data_parallel_world_size)
                    mine = shards[buffer.data_parallel_group.rank()].clone()
                    dist.all_gather(shards, mine, group=buffer.data_parallel_group)
    kept = [(local.tensor, local.tensor.data) for local in local_parameters(model)]
    for parameter, _ in kept:
        parameter.data = parameter.main_grad
    try:
        return whole(model)
    finally:
        for parameter, data in kept:
            parameter.data = data


def record(scenario: Scenario, layout: Layout) -> tuple[np.ndarray, list[np.ndarray]]:
    """On one rank and one micro-batch: log-probs [D] and routes of θ̄ where it routes natively."""
    models = start(scenario, layout)
    with models.anchor.swapped_in():
        return record_live(models, scenario.batch)


def record_live(models: ActorCritic, batch: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """As `record`, of the live weights."""
    stream, rows = streams(batch)[0], np.arange(len(batch))
    logprobs = read(models, models.actor, stream, batch, rows, replay=False)[0]
    planned = plan(models, stream, rows)
    layout = build_layout(stream, planned.assignment[0][0], length=planned.length, cp=1, tp=1)
    return logprobs.numpy(), _by_trajectory(models.actor.model, layout, batch.lengths)


def _by_trajectory(model: Model, layout, lengths: Sequence[int]) -> list[np.ndarray]:
    chosen = np.stack([handle.recorded.numpy() for handle in model.registry.handles]).astype(np.uint8)
    place = dict(zip(layout.rows, layout.cu_seqlens, strict=False))
    return [chosen[:, place[row] : place[row] + n - 1] for row, n in enumerate(lengths)]


def micro_batches(scenario: Scenario, layout: Layout) -> int:
    """Number of micro-batches of the actor's step."""
    models = start(scenario, layout)
    return plan(models, streams(scenario.batch)[0], np.flatnonzero(np.arange(len(scenario.batch)) != EMPTY_ROW)).count


def actor_only(result: Result) -> Result:
    """The first step's part that the policy computes."""
    first = result.steps[0]
    readings = {name: values for name, values in first.readings.items() if name != "values"}
    metrics = {name: value for name, value in first.metrics.items() if name.startswith("actor/")}
    weights = {name: first.weights[name] for name in ("actor", "ewma")}
    kept = StepResult(readings, first.margin, metrics, {"actor": first.gradients["actor"]}, weights, first.z)
    return Result({}, {}, [kept])
