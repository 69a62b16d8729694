"""RolloutBatch → ScoredBatch: values, log-probs of anchor and reference, rewards on decisions, advantages and
returns."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.backend import platform
from megatron_rl.backend.micro_batch import MicroBatch, RouteSpec, prepare_micro_batches
from megatron_rl.backend.model import Model
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.step import Readout, score
from megatron_rl.batching import (
    MicroBatchPlan,
    TokenStream,
    actor_stream,
    critic_stream,
    decision_offsets,
    plan_micro_batches,
)
from megatron_rl.config import RunConfig
from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.objectives.advantages import gae, whiten
from megatron_rl.objectives.diagnostics import mismatch, pearson
from megatron_rl.objectives.numerics import moments
from megatron_rl.objectives.rewards import place_rewards, shape_with_kl, successor_values
from megatron_rl.objectives.value import explained_variance
from megatron_rl.reduce import gather_slots, sum_over
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, RolloutBatch
from megatron_rl.training.agents import Agents
from megatron_rl.training.records import ScoredBatch


def readout(config: RunConfig) -> Readout:
    """How log-probs are read: at the sampling temperature."""
    return Readout(config.rollout.temperature, config.batching.logprob_chunk)


def plan(agents: Agents, stream: TokenStream, rows: np.ndarray, *, budget: int | None = None) -> MicroBatchPlan:
    """Micro-batches of these trajectories under the run's layout and token budget."""
    layout, batching = agents.topology.config, agents.config.batching
    return plan_micro_batches(
        stream.lengths,
        token_budget=budget or batching.token_budget,
        data_ranks=agents.topology.dp,
        cp=layout.context,
        tp=layout.tensor,
        cost=agents.cost,
        count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        rows=rows,
        pad_each_to=padded_to(agents, stream, rows),
    )


def padded_to(agents: Agents, stream: TokenStream, rows: np.ndarray) -> int | None:
    """Common padded length of unpacked batching, None when packing."""
    if agents.config.batching.packed or not len(rows):
        return None
    multiple = 2 * agents.topology.config.context if agents.topology.config.context > 1 else 1
    return -(-int(stream.lengths[rows].max()) // multiple) * multiple


def route_spec(model: Model, batch: RolloutBatch, *, replay: bool) -> RouteSpec:
    """Recorded routes of this rank's layers; native routing for a critic or when replay is off."""
    hf = model.hf
    layers = {layer: hf.moe_layers.index(layer) for layer in model.registry.layers}

    def recorded(row: int, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
        routes = batch.routes[row]
        if routes is None:
            file, line = batch.sources[row]
            raise RouteError(
                "routes are to be replayed but were not recorded", file=file, row=line, setting="replay.enabled=false"
            )
        return routes[indices[:, None], rows]

    return RouteSpec(recorded if replay else None, layers, hf.num_experts, hf.topk)


def prepare(
    agents: Agents, model: Model, stream: TokenStream, batch: RolloutBatch, planned: MicroBatchPlan, rows: np.ndarray,
    *, replay: bool, aux_weight: float | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """This rank's micro-batches of a plan."""
    return prepare_micro_batches(
        stream,
        planned,
        agents.topology,
        route_spec(model, batch, replay=replay),
        pad_each_to=padded_to(agents, stream, rows),
        aux_weight=aux_weight,
    )


def score_slots(
    agents: Agents, optimizer: Optimizer, stream: TokenStream, micro_batches: list[MicroBatch], length: int
) -> torch.Tensor:
    """[c, slots] readings on every rank, without gradients."""
    topology = agents.topology
    slots, readings = score(optimizer.model, micro_batches, length, readout(agents.config))
    return gather_slots(
        slots,
        readings,
        stream.slots,
        data_group=topology.dp_cp_group,
        pipeline_group=topology.pp_group,
        has_values=topology.last_stage,
    )


def policy_logprobs(agents: Agents, stream: TokenStream, batch: RolloutBatch, rows, *, budget=None, replay=None):
    """[D] log-probs of the live actor weights for these trajectories, 0 for decisions of others."""
    planned = plan(agents, stream, rows, budget=budget)
    replay = agents.config.replay.enabled if replay is None else replay
    parts = prepare(agents, agents.actor.model, stream, batch, planned, rows, replay=replay)
    return score_slots(agents, agents.actor, stream, parts, planned.length)[0]


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


def trainable_rows(batch: RolloutBatch) -> np.ndarray:
    """Trajectories with a decision and an outcome that may enter a loss."""
    decisions = np.diff(decision_offsets(batch.action_mask, batch.offsets))
    allowed = np.array([outcome not in EXCLUDED_OUTCOMES for outcome in batch.outcome], bool)
    return np.flatnonzero((decisions > 0) & allowed)


def score_batch(agents: Agents, batch: RolloutBatch) -> ScoredBatch:
    """Everything that is worked out once per rollout batch, before any update.

    Args:
        agents: live models; their weights are unchanged.
        batch: validated rollouts.
    """
    device, algorithm = platform.device(), agents.config.algorithm
    actor, critic = streams(batch)
    rows = trainable_rows(batch)
    tensor = lambda array, dtype: torch.tensor(np.asarray(array), dtype=dtype, device=device)  # noqa: E731
    offsets = tensor(decision_offsets(batch.action_mask, batch.offsets), torch.int64)
    mask = np.asarray(batch.action_mask)
    behaviour = tensor(np.asarray(batch.logprobs)[mask], torch.float32)
    values, bootstrap, load = _values(agents, critic, batch, rows, len(behaviour))
    _check_finite(batch, offsets, values, "critic values")
    anchor = policy_logprobs(agents, actor, batch, rows) if algorithm.anchor == "recompute" else None
    reference = _reference(agents, actor, batch, rows)
    for name, logprobs in (("anchor log-probs", anchor), ("reference log-probs", reference)):
        if logprobs is not None:
            _check_finite(batch, offsets, logprobs, name)
    rewards = _rewards(batch, offsets, device)
    if algorithm.kl_reward_coef:
        rewards = shape_with_kl(rewards, behaviour, reference, algorithm.kl_reward_coef)
    successor, _ = successor_values(
        tensor(batch.truncated, torch.bool),
        tensor(batch.boundary_known, torch.bool),
        bootstrap.double(),
        "zero" if algorithm.missing_boundary == "zero" else "error",
    )
    advantages, returns = gae(
        rewards.double(),
        values.double(),
        offsets,
        gamma=algorithm.gamma,
        lam_actor=algorithm.lam_actor,
        lam_critic=algorithm.lam_critic,
        bootstrap=successor.double(),
    )
    kept = decisions_of(offsets, rows)
    metrics = _batch_metrics(batch, rows, values.double()[kept], returns[kept])
    if anchor is not None:
        metrics |= {f"mismatch/{k}": v for k, v in mismatch_metrics(anchor[kept], behaviour[kept]).items()}
    if algorithm.whiten and kept.any():
        whitened = torch.zeros_like(advantages)
        whitened[kept] = whiten(advantages[kept])
        advantages = whitened
    return ScoredBatch(
        batch, actor, critic, rows, offsets, behaviour, tensor(np.asarray(batch.version)[mask], torch.int64), anchor,
        reference, values, advantages.float(), returns.float(), load, metrics,
    )  # fmt: skip


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


def decisions_of(offsets: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """bool [D]: decisions of these trajectories."""
    chosen = torch.zeros(len(offsets) - 1, dtype=torch.bool, device=offsets.device)
    chosen[torch.as_tensor(rows, device=offsets.device)] = True
    return chosen.repeat_interleave(offsets.diff())


def _values(agents: Agents, stream: TokenStream, batch, rows, decisions: int):
    """Values [D], bootstrap values [B], and the experts the critic chose."""
    planned = plan(agents, stream, rows)
    parts = prepare(agents, agents.critic.model, stream, batch, planned, rows, replay=False)
    readings = score_slots(agents, agents.critic, stream, parts, planned.length)[0]
    topology = agents.topology
    load = {
        handle.layer: sum_over(handle.load.clone(), topology.dp_cp_group, topology.tp_group)
        for handle in agents.critic.model.registry.handles
    }
    return readings[:decisions], readings[decisions:], load


def _reference(agents: Agents, stream: TokenStream, batch, rows) -> torch.Tensor | None:
    if agents.reference is None:
        return None
    with agents.reference.swapped_in():
        replay = agents.config.replay.enabled and agents.config.replay.reference
        return policy_logprobs(agents, stream, batch, rows, replay=replay)


def _rewards(batch: RolloutBatch, offsets: torch.Tensor, device) -> torch.Tensor:
    """[D]: terminal reward on the last decision, feedback on the last decision of its turn."""
    turn_id = np.asarray(batch.turn_id)[np.asarray(batch.action_mask)]
    decisions = offsets.cpu().numpy()
    starts = np.flatnonzero(np.diff(turn_id, prepend=-2) != 0) if len(turn_id) else np.empty(0, np.int64)
    # A trajectory's first decision starts a turn even where the turn number happens to continue the one before.
    starts = np.union1d(starts, decisions[:-1][np.diff(decisions) > 0])
    turn_offsets = np.append(starts, len(turn_id))
    return place_rewards(
        torch.tensor(np.asarray(batch.reward), device=device),
        offsets,
        torch.tensor(np.asarray(batch.turn_rewards), device=device),
        torch.as_tensor(turn_offsets, device=device),
    )


def mismatch_metrics(logprobs: torch.Tensor, behaviour: torch.Tensor) -> dict[str, float]:
    """Trainer against engine on the decisions both scored: mean k1 and k3, share of ratios beyond 2 and 5, largest."""
    found = mismatch(logprobs, behaviour)
    means = {name: _ratio(getattr(found, name)) for name in ("k1", "k3", "extreme2", "extreme5")}
    return means | {"largest": float(found.largest), "pearson": float(pearson(found.probabilities))}


def _ratio(sums: torch.Tensor) -> float:
    return float(sums[0] / sums[1]) if sums[1] != 0 else float("nan")


def _batch_metrics(
    batch: RolloutBatch, rows: np.ndarray, values: torch.Tensor, returns: torch.Tensor
) -> dict[str, float]:
    if not len(rows):
        return {"rollout/trajectories": 0.0}
    totals = [
        float(batch.reward[b]) + float(batch.turn_rewards[batch.turn_offsets[b] : batch.turn_offsets[b + 1]].sum())
        for b in rows
    ]
    lengths = np.diff(batch.offsets)[rows]
    return {
        "rollout/trajectories": float(len(rows)),
        "rollout/reward_mean": float(np.mean(totals)),
        "rollout/reward_std": float(np.std(totals)),
        "rollout/tokens_mean": float(lengths.mean()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/turns_mean": float(np.diff(batch.turn_offsets)[rows].mean()),
        "rollout/truncated": float(np.asarray(batch.truncated)[rows].mean()),
        "rollout/success": float(np.mean([bool(batch.metadata[b].get("success", False)) for b in rows]))
        if batch.metadata
        else float("nan"),
        "critic/explained_variance": float(explained_variance(moments(returns), moments(returns - values))),
    }
