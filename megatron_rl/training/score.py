"""RolloutBatch → ScoredBatch: values, log-probs of anchor and reference, rewards on decisions, advantages and
returns."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import torch

from megatron_rl.algorithm.metrics import (
    batch_metrics,
    mismatch_metrics,
    prompt_information_metrics,
    prompt_mean_baseline,
    staleness_metrics,
)
from megatron_rl.algorithm.off_policy import accepted_decisions
from megatron_rl.algorithm.selection import integer_ids, select, total_rewards
from megatron_rl.algorithm.timeline import correct_rows, place_all_rewards, timeline
from megatron_rl.backend import platform
from megatron_rl.batching import (
    TokenStream,
    decision_offsets,
)
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import RolloutError
from megatron_rl.methods import Estimate, EstimatorInputs, Timeline
from megatron_rl.objectives.advantages import whiten
from megatron_rl.objectives.importance import keep_by_staleness
from megatron_rl.objectives.rewards import overlong_filter, shape_with_kl, successor_values
from megatron_rl.objectives.segments import repeat
from megatron_rl.reduce import sum_over
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import decisions_of, policy_logprobs, prepare, score_slots, streams
from megatron_rl.training.records import ScoredBatch


def score_batch(models: ActorCritic, batch: RolloutBatch, *, monte_carlo: bool = False) -> ScoredBatch:
    """Everything that is worked out once per rollout batch, before any update.

    Args:
        models: live models; their weights are unchanged.
        batch: validated rollouts.
        monte_carlo: critic targets with λ = 1, for value pretraining.
    """
    algorithm = models.config.algorithm
    selection = select(algorithm, batch)
    rows, metrics = selection
    actor, critic = streams(batch)
    times = timeline(batch, _tensor(decision_offsets(batch.action_mask, batch.offsets), torch.int64))
    offsets, mask = times.offsets, np.asarray(batch.action_mask)
    behaviour = _tensor(np.asarray(batch.logprobs)[mask], torch.float32)
    versions = _tensor(np.asarray(batch.version)[mask], torch.int64)
    values, bootstrap, load = _values(models, critic, batch, rows, len(behaviour))
    anchor = policy_logprobs(models, actor, batch, rows) if algorithm.anchor.name == "recompute" else None
    reference = _reference(models, actor, batch, rows)
    _check_all_finite(batch, offsets, {"critic values": values, "anchor log-probs": anchor,
                                       "reference log-probs": reference})  # fmt: skip
    played = decisions_of(offsets, rows)
    estimated = _estimate(models, batch, times, behaviour, reference, played, (values, bootstrap), monte_carlo)
    kept = _policy_decisions(models, batch, times, played, versions, anchor, behaviour)
    value_kept = _value_decisions(algorithm, batch, times, played)
    advantages = estimated.advantages
    if algorithm.estimator.whiten and kept.any():
        whitened = torch.zeros_like(advantages)
        whitened[kept] = whiten(advantages[kept])
        advantages = whitened
    metrics = {**metrics, **batch_metrics(batch, rows), **estimated.metrics}
    metrics |= staleness_metrics(versions, models.version, played)
    metrics |= prompt_information_metrics(batch, rows, algorithm.information_prompts, partial(_native_logprobs, models))
    metrics |= _divergences(anchor, reference, behaviour, kept)
    if algorithm.needs_critic:
        metrics |= prompt_mean_baseline(batch, rows)
    return ScoredBatch(
        batch=batch,
        actor=actor,
        critic=critic,
        rows=rows,
        offsets=offsets,
        turn_offsets=times.turn_offsets,
        prompts=integer_ids(batch.prompt_ids).to(offsets.device),
        groups=integer_ids(batch.group_ids).to(offsets.device),
        kept=kept,
        value_kept=value_kept,
        correct=correct_rows(algorithm, batch, _tensor(total_rewards(batch), torch.float64))
        if algorithm.needs_correct
        else None,
        behaviour=behaviour,
        versions=versions,
        anchor=anchor,
        reference=reference,
        values=values,
        advantages=advantages.float(),
        returns=None if estimated.returns is None else estimated.returns.float(),
        critic_load=load,
        actor_steps=models.actor.steps,
        metrics=metrics,
    )


def _tensor(array, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype, device=platform.device())


def _estimate(
    models: ActorCritic,
    batch: RolloutBatch,
    times: Timeline,
    behaviour,
    reference,
    played: torch.Tensor,
    critic,
    monte_carlo,
) -> Estimate:
    """Rewards placed and shaped, then advantages and returns."""
    algorithm, (values, bootstrap) = models.config.algorithm, critic
    rewards = place_all_rewards(algorithm, batch, times)
    if algorithm.kl_reward:
        rewards = shape_with_kl(rewards, behaviour, reference, models.controllers.kl_coef)
    inputs = EstimatorInputs(batch, times, rewards.double(), played, algorithm.gamma, monte_carlo=monte_carlo)
    if values is None:
        return algorithm.estimator.estimate(inputs)
    successor, _ = successor_values(
        _tensor(batch.truncated, torch.bool),
        _tensor(batch.boundary_known, torch.bool),
        bootstrap.double(),
        "zero" if algorithm.missing_boundary == "zero" else "error",
    )
    return algorithm.estimator.estimate(
        dataclasses.replace(inputs, values=values.double(), bootstrap=successor.double())
    )


def _policy_decisions(
    models: ActorCritic, batch: RolloutBatch, times: Timeline, played: torch.Tensor, versions, anchor, behaviour
) -> torch.Tensor:
    """bool [D]: of the decisions in play, those that overlong filter, staleness and a known anchor leave."""
    algorithm, offsets = models.config.algorithm, times.offsets
    kept = played
    if stale := algorithm.stale_decisions:
        kept = kept & keep_by_staleness(versions, models.version, stale.max_versions, offsets, stale.rule)
    if algorithm.overlong_filter:
        kept = kept & repeat(_overlong(batch)[0], offsets)
    return kept if anchor is None else accepted_decisions(algorithm, anchor, behaviour, offsets, kept)


def _value_decisions(algorithm: AlgorithmConfig, batch: RolloutBatch, times: Timeline, played: torch.Tensor):
    """bool [D]: decisions the critic learns from. What the overlong filter takes from the policy stays, if its
    successor value is known."""
    if algorithm.estimator.unit == "turn":
        played = played & times.turn_starts
    return played & repeat(_overlong(batch)[1], times.offsets) if algorithm.overlong_filter else played


def _overlong(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return overlong_filter(_tensor(batch.truncated, torch.bool), _tensor(batch.boundary_known, torch.bool))


def _divergences(anchor, reference, behaviour: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
    """Mismatch between anchor and sampler, and mean k3 between sampler and reference."""
    metrics: dict[str, float] = {}
    if not kept.any():
        return metrics
    if anchor is not None:
        metrics |= {f"mismatch/{k}": v for k, v in mismatch_metrics(anchor[kept], behaviour[kept]).items()}
    if reference is not None:
        metrics["policy/kl_to_reference"] = mismatch_metrics(reference[kept], behaviour[kept])["k3"]
    return metrics


def _native_logprobs(models: ActorCritic, stream: TokenStream) -> torch.Tensor:
    # A response after another's prompt may be longer than any sequence that was played.
    budget = max(models.config.batching.token_budget, int(stream.lengths.max()))
    return policy_logprobs(models, stream, None, np.arange(len(stream.lengths)), budget=budget, replay=False)


def _check_all_finite(batch: RolloutBatch, offsets: torch.Tensor, scores: dict[str, torch.Tensor | None]) -> None:
    for what, found in scores.items():
        if found is not None:
            _check_finite(batch, offsets, found, what)


def _check_finite(batch: RolloutBatch, offsets: torch.Tensor, scores: torch.Tensor, what: str) -> None:
    """Stop before a NaN or infinity of a model reaches an advantage; names the first trajectory it was read from."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(torch.searchsorted(offsets, bad[0], right=True)) - 1
        file, line = batch.sources[row]
        raise RolloutError(
            f"{what} of a trajectory are not finite",
            file=file,
            row=line,
            field=what,
            found=float(scores[bad[0, 0]]),
            expected="finite numbers",
            setting="model.path or critic_optimizer.lr: the model that scored it has diverged or was not loaded",
        )


def _values(models: ActorCritic, stream: TokenStream, batch, rows, decisions: int):
    """Values [D], bootstrap values [B], and the experts the critic chose; (None, None, {}) without a critic."""
    if models.critic is None:
        return None, None, {}
    prepared = prepare(models, models.critic.model, stream, batch, rows, replay=False)
    readings = score_slots(models, models.critic, prepared)[0]
    topology = models.topology
    load = {
        handle.layer: sum_over(handle.load.clone(), topology.dp_cp_group, topology.tp_group)
        for handle in models.critic.model.registry.handles
    }
    return readings[:decisions], readings[decisions:], load


def _reference(models: ActorCritic, stream: TokenStream, batch, rows) -> torch.Tensor | None:
    if models.reference is None:
        return None
    with models.reference.swapped_in():
        replay = models.config.replay.enabled and models.config.replay.reference
        return policy_logprobs(models, stream, batch, rows, replay=replay)
