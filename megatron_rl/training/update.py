"""One optimizer step of the actor or the critic over a minibatch of trajectories."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.metrics import mismatch_metrics
from megatron_rl.algorithm.off_policy import accepted_decisions, importance_weights, removal_metrics
from megatron_rl.algorithm.step_losses import (
    POLICY_SUMS,
    VALUE_SUMS,
    CoefficientStepLoss,
    PolicyStepLoss,
    ValueStepLoss,
    loss_weights,
)
from megatron_rl.algorithm.whole_step import StepVectors, WholeStepLoss, whole_step_loss
from megatron_rl.backend import platform
from megatron_rl.backend.frozen import attention, step_without
from megatron_rl.backend.micro_batch import MicroBatch
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.replay import RouterLosses
from megatron_rl.backend.step import LossFunction, train
from megatron_rl.config import AlgorithmConfig
from megatron_rl.methods import AggregationRule, Segments
from megatron_rl.methods.aggregation_rules import TokenMean
from megatron_rl.objectives.segments import repeat
from megatron_rl.reduce import from_last, sum_over
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import PreparedPass, decisions_of, prepare, sampling_readout, score_slots
from megatron_rl.training.records import ScoredBatch


def update_actor(models: ActorCritic, scored: ScoredBatch, rows: np.ndarray) -> dict[str, float]:
    """One policy step on these trajectories; the anchor ticks if it was completed.

    Returns:
        Metrics, the same on every rank. A minibatch without decisions, or whose decisions were all removed, changes
        nothing and says `actor/skipped`.
    """
    algorithm = models.config.algorithm
    kept = scored.kept & decisions_of(scored.offsets, rows)
    if not kept.any():
        return {"actor/skipped": 1.0}
    prepared = _prepare(models, models.actor, scored, rows)
    anchor = _anchor(models, scored, prepared)
    kept, metrics = _remove(algorithm, scored, rows, kept, anchor)
    if not kept.any():
        return metrics | {"actor/skipped": 1.0}
    vectors, weight_metrics = _vectors(algorithm, scored, kept, anchor)
    whole = _whole_step(models, scored, prepared, vectors) if algorithm.policy.needs_whole_step else None
    kl_coef = models.controllers.kl_coef if algorithm.kl_loss else 0.0
    terms = PolicyStepLoss(algorithm, vectors, kl_coef, whole)
    losses = _router_losses(models, _recorded_load(models, prepared))
    sums, step = _step(models, models.actor, prepared, terms, losses, len(POLICY_SUMS))
    metrics |= (
        weight_metrics
        | step
        | {f"mismatch/anchor_{k}": v for k, v in mismatch_metrics(anchor[kept], scored.behaviour[kept]).items()}
    )
    metrics |= {} if whole is None else whole.metrics
    metrics |= _named("actor", POLICY_SUMS, sums) | _replay_metrics(models)
    if models.anchor is not None and metrics["actor/stepped"]:
        models.anchor.tick()
    return metrics


def update_critic(models: ActorCritic, scored: ScoredBatch, rows: np.ndarray) -> dict[str, float]:
    """One critic step on these trajectories. Returns metrics as `update_actor` does."""
    algorithm = models.config.algorithm
    assert models.critic is not None and scored.returns is not None and scored.values is not None
    kept = scored.value_kept & decisions_of(scored.offsets, rows)
    if not kept.any():
        return {"critic/skipped": 1.0}
    weights = _weights(scored, kept, algorithm.value_weights)
    terms = ValueStepLoss(algorithm, scored.returns, scored.values, weights)
    losses = _router_losses(models, scored.critic_load)
    prepared = _prepare(models, models.critic, scored, rows)
    sums, step = _step(models, models.critic, prepared, terms, losses, len(VALUE_SUMS))
    return _named("critic", VALUE_SUMS, sums) | step


def _named(prefix: str, names: tuple[str, ...], sums: torch.Tensor) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in zip(names, sums, strict=True)}


def _weights(scored: ScoredBatch, kept: torch.Tensor, rule: AggregationRule) -> torch.Tensor:
    return loss_weights(rule, scored.offsets, kept, scored.prompts)


def _prepare(models: ActorCritic, optimizer: Optimizer, scored: ScoredBatch, rows: np.ndarray) -> PreparedPass:
    """The micro-batches of one optimizer step, for every pass it takes. Only the actor replays routes."""
    actor = optimizer.model.role == "policy"
    # Every token that routers saw in rollout: all but each trajectory's last. Read by router losses alone.
    routed = int((np.diff(scored.batch.offsets)[rows] - 1).sum())
    return prepare(
        models,
        optimizer.model,
        scored.actor if actor else scored.critic,
        scored.batch,
        rows,
        replay=models.config.replay.enabled and actor,
        aux_weight=1.0 / max(routed, 1),
    )


def _anchor(models: ActorCritic, scored: ScoredBatch, prepared: PreparedPass) -> torch.Tensor:
    """[D] log-probs of the proximal policy, for the decisions of these trajectories."""
    kind = models.config.algorithm.anchor.name
    if kind == "behaviour":
        return scored.behaviour
    if kind == "recompute":
        assert scored.anchor is not None
        return scored.anchor
    assert models.anchor is not None
    with models.anchor.swapped_in():
        anchor = score_slots(models, models.actor, prepared)[0]
    return torch.where(decisions_of(scored.offsets, prepared.rows), anchor, scored.behaviour)


def _remove(
    algorithm: AlgorithmConfig, scored: ScoredBatch, rows: np.ndarray, kept: torch.Tensor, anchor: torch.Tensor
):
    """(decisions that rejection and veto leave, how much was removed in all). An anchor known at scoring has removed
    there already."""
    if not algorithm.removes:
        return kept, {}
    left = accepted_decisions(algorithm, anchor, scored.behaviour, scored.offsets, kept)
    before = decisions_of(scored.offsets, rows)
    return left, removal_metrics(before, left, anchor, scored.behaviour)


def _vectors(algorithm: AlgorithmConfig, scored: ScoredBatch, kept: torch.Tensor, anchor: torch.Tensor):
    """(constants of the step, metrics of the importance weights)."""
    weights = _weights(scored, kept, algorithm.decision_weights)
    omega, metrics = importance_weights(
        algorithm, anchor, scored.behaviour, scored.offsets, scored.turn_offsets, weights
    )
    likelihood = None
    if algorithm.likelihood_coef:
        assert scored.correct is not None
        solved = kept & repeat(scored.correct, scored.offsets)
        likelihood = algorithm.likelihood_coef * _weights(scored, solved, TokenMean())
        metrics["actor/correct"] = float(solved.sum() / kept.sum())
    vectors = StepVectors(scored.advantages, scored.behaviour, anchor, scored.reference, weights, omega, likelihood)
    return vectors, metrics


def _whole_step(
    models: ActorCritic, scored: ScoredBatch, prepared: PreparedPass, vectors: StepVectors
) -> WholeStepLoss:
    """The policy loss on log π_θ of the whole step, read in a scoring pass unless the anchor was just scored by θ."""
    algorithm = models.config.algorithm
    if scored.anchor is not None and models.actor.steps == scored.actor_steps:
        logprobs = scored.anchor
    else:
        logprobs = score_slots(models, models.actor, prepared)[0]
    exact = None
    if getattr(algorithm.policy, "clipping_bias", None) == "exact":
        exact = partial(_gradient_norm, models, prepared)
    segments = Segments(scored.offsets, scored.turn_offsets, scored.groups, scored.correct)
    return whole_step_loss(algorithm.policy, logprobs, vectors, segments, exact)


def _gradient_norm(models: ActorCritic, prepared: PreparedPass, coefficients: torch.Tensor) -> float:
    """‖Σ c_j ∇log π_θ(a_j)‖₂ by a backward pass; leaves no gradient behind."""
    _train(models, models.actor, prepared, CoefficientStepLoss(coefficients))
    models.actor.megatron.prepare_grads()
    norm = models.actor.gradient_norm()
    models.actor.zero_grad()
    return norm


def _train(
    models: ActorCritic, optimizer: Optimizer, prepared: PreparedPass, terms: LossFunction,
    losses: RouterLosses | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Accumulate and reduce the gradients of one pass. Returns logged sums as `step.train` does."""
    how = sampling_readout(models.config)
    return train(optimizer.model, prepared.micro_batches, prepared.plan.length, how, terms, losses)


def _step(
    models: ActorCritic, optimizer: Optimizer, prepared: PreparedPass, terms: LossFunction,
    losses: RouterLosses | None, width: int,
) -> tuple[torch.Tensor, dict[str, float]]:  # fmt: skip
    """(logged sums float64 [width] over all ranks, metrics) of a forward-backward pass and an optimizer step."""
    topology = models.topology
    name = "actor" if optimizer.model.role == "policy" else "critic"
    sums = _train(models, optimizer, prepared, terms, losses)
    total = torch.zeros(width, dtype=torch.float64, device=platform.device())
    if sums is not None:
        total = sum_over(sums.clone(), topology.dp_cp_group)
    total = from_last(total, topology.pp_group)
    rate = optimizer.learning_rate()
    frozen = name == "critic" and models.config.algorithm.critic.freeze_attention
    stepped, norm = step_without(optimizer, attention) if frozen else optimizer.step()
    return total, {
        f"{name}/stepped": float(stepped),
        f"{name}/grad_norm": norm,
        f"{name}/lr": rate,
        f"{name}/micro_batches": float(prepared.plan.count),
    } | _router_loss_metrics(optimizer, losses, name)


def _router_losses(models: ActorCritic, load: dict[int, torch.Tensor]) -> RouterLosses | None:
    """Coefficients and the step's expert frequencies, or None where no router loss is configured."""
    coefs = models.config.algorithm.router_losses
    if not (coefs.aux_coef or coefs.z_coef):
        return None
    frequencies = {layer: (count / count.sum().clamp(min=1)).float() for layer, count in load.items()}
    return RouterLosses(coefs.aux_coef, coefs.z_coef, frequencies)


def _recorded_load(models: ActorCritic, prepared: PreparedPass) -> dict[int, torch.Tensor]:
    """Expert counts of the step's recorded routes for this rank's layers; a native count where replay is off."""
    model, algorithm = models.actor.model, models.config.algorithm
    if not algorithm.router_losses.aux_coef:
        return {}
    if models.config.replay.enabled:
        parts, experts = prepared.micro_batches, model.hf.num_experts
        load = {layer: _chosen(parts, layer, experts) for layer in model.registry.layers}
    else:
        score_slots(models, models.actor, prepared)
        load = {handle.layer: handle.load.clone() for handle in model.registry.handles}
    groups = (models.topology.dp_cp_group, models.topology.tp_group)
    return {layer: sum_over(count, *groups) for layer, count in load.items()}


def _chosen(parts: list[MicroBatch], layer: int, experts: int) -> torch.Tensor:
    """float64 [E]: how often each expert was recorded for this rank's tokens; missing rows are in no count."""
    routers = [part.router for part in parts]
    ids = torch.cat([rows.routes[layer][rows.real].flatten() for rows in routers if rows.routes is not None])
    return torch.bincount(ids[ids >= 0], minlength=experts).double()


def _router_loss_metrics(optimizer: Optimizer, losses: RouterLosses | None, name: str) -> dict[str, float]:
    if losses is None:
        return {}
    device = platform.device()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for handle in optimizer.model.registry.handles:
        total += handle.losses
    dist.all_reduce(total)
    return {f"{name}/aux_loss": float(total[0]), f"{name}/z_loss": float(total[1])}


def _replay_metrics(models: ActorCritic) -> dict[str, float]:
    """Agreement of replayed with native ids, and missing rows. One fixed-size tensor on every rank, whatever its
    layers."""
    model = models.actor.model
    layers = model.hf.moe_layers
    if not models.config.replay.enabled or not layers:
        return {}
    table = torch.zeros(len(layers), 4, dtype=torch.float64, device=platform.device())
    for handle in model.registry.handles:
        table[layers.index(handle.layer)] = torch.cat((handle.agreed, handle.missing))
    dist.all_reduce(table)
    agreement = table[:, 0] / table[:, 1].clamp(min=1)
    shares = {f"replay/agreement_layer{layer}": float(value) for layer, value in zip(layers, agreement, strict=True)}
    return shares | {
        "replay/agreement": float(table[:, 0].sum() / table[:, 1].sum().clamp(min=1)),
        "replay/missing": float(table[:, 2].sum() / table[:, 3].sum().clamp(min=1)),
    }
