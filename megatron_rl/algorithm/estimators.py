"""Advantages and critic targets of a scored batch, by any estimator: no model, no process group, whole-batch
vectors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.algorithm.selection import integer_ids
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import RolloutError
from megatron_rl.objectives import groups
from megatron_rl.objectives.advantages import evpo, gae, length_adaptive_lambda, turn_gae
from megatron_rl.objectives.numerics import moments
from megatron_rl.objectives.rewards import place_rewards, soft_overlong_penalty
from megatron_rl.objectives.segments import last_positions, local_segment_sum, repeat
from megatron_rl.objectives.value import explained_variance, place_on_first_decisions
from megatron_rl.rollouts.schema import RolloutBatch


@dataclass(frozen=True)
class Timeline:
    """Decisions, turns and trajectories of a batch."""

    offsets: torch.Tensor
    """int64 [B+1] into decisions."""
    turn_offsets: torch.Tensor
    """int64 [K+1] into decisions; no turn is empty."""
    sequence_turns: torch.Tensor
    """int64 [B+1] into turns."""

    @property
    def turn_starts(self) -> torch.Tensor:
        """bool [D]: the first decision of each turn."""
        first = torch.zeros(int(self.offsets[-1]), dtype=torch.bool, device=self.offsets.device)
        first[self.turn_offsets[:-1]] = True
        return first


@dataclass(frozen=True)
class Estimate:
    """What an estimator gives."""

    advantages: torch.Tensor
    """float64 [D], before whitening."""
    returns: torch.Tensor | None
    """float64 [D] critic targets; None without a critic."""
    metrics: dict[str, float]


def timeline(batch: RolloutBatch, offsets: torch.Tensor) -> Timeline:
    """Where turns begin: at a change of `turn_id`, and at each trajectory's first decision."""
    turn_id = np.asarray(batch.turn_id)[np.asarray(batch.action_mask)]
    decisions = offsets.cpu().numpy()
    starts = np.flatnonzero(np.diff(turn_id, prepend=-2) != 0) if len(turn_id) else np.empty(0, np.int64)
    # A trajectory's first decision starts a turn even where the turn number happens to continue the one before.
    starts = np.union1d(starts, decisions[:-1][np.diff(decisions) > 0]).astype(np.int64)
    turns = np.searchsorted(starts, decisions, side="left")
    place = lambda array: torch.as_tensor(array, device=offsets.device)  # noqa: E731
    return Timeline(offsets, place(np.append(starts, len(turn_id))), place(turns))


def place_all_rewards(algorithm: AlgorithmConfig, batch: RolloutBatch, times: Timeline) -> torch.Tensor:
    """float32 [D]: terminal reward and overlong penalty on the last decision, feedback on the last of its turn."""
    device = times.offsets.device
    rewards = place_rewards(
        torch.tensor(np.asarray(batch.reward), device=device),
        times.offsets,
        torch.tensor(np.asarray(batch.turn_rewards), device=device),
        times.turn_offsets,
    )
    if algorithm.overlong_buffer:
        lengths = times.offsets.diff()
        penalty = soft_overlong_penalty(lengths, algorithm.overlong_length, algorithm.overlong_buffer)
        rewards = rewards.index_add(0, last_positions(times.offsets), penalty[lengths > 0].to(rewards.dtype))
    return rewards


def correct_rows(algorithm: AlgorithmConfig, batch: RolloutBatch, returns: torch.Tensor) -> torch.Tensor:
    """bool [B]: solved trajectories, by their return (float [B]) or by `success` in their metadata.

    Raises:
        RolloutError: neither a bound is set nor `success` recorded.
    """
    if algorithm.correct_return is not None:
        return returns >= algorithm.correct_return
    for row in range(len(batch)):
        if not batch.metadata or "success" not in batch.metadata[row]:
            file, line = batch.sources[row]
            raise RolloutError(
                "the record does not say whether the trajectory is correct", file=file, row=line, field="metadata",
                found="no 'success'", expected="true or false", setting="algorithm.correct_return",
            )  # fmt: skip
    return torch.tensor([bool(entry["success"]) for entry in batch.metadata], device=returns.device)


def estimate(
    algorithm: AlgorithmConfig,
    batch: RolloutBatch,
    times: Timeline,
    rewards: torch.Tensor,
    kept: torch.Tensor,
    values: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
    *,
    monte_carlo: bool = False,
) -> Estimate:
    """Advantages and returns by `algorithm.advantage`.

    Args:
        rewards: float64 [D], shaped.
        kept: bool [D]: decisions of trajectories in play; only these enter statistics.
        values, bootstrap: float64 [D] and [B] of the critic, where there is one.
        monte_carlo: critic targets with λ = 1 (value pretraining).
    """
    if algorithm.needs_critic:
        lam = 1.0 if monte_carlo else algorithm.lam_critic
        return _from_critic(algorithm, times, rewards, kept, values, bootstrap, lam)
    if algorithm.advantage == "none":
        return Estimate(torch.zeros_like(rewards), None, {})
    included = local_segment_sum(kept, times.offsets) > 0
    per_sequence, metrics = _from_groups(algorithm, batch, local_segment_sum(rewards, times.offsets), included)
    return Estimate(repeat(per_sequence, times.offsets), None, metrics)


def _from_critic(algorithm: AlgorithmConfig, times: Timeline, rewards, kept, values, bootstrap, lam_critic) -> Estimate:
    lam_actor: float | torch.Tensor = algorithm.lam_actor
    if algorithm.lam_alpha is not None:
        lam_actor = length_adaptive_lambda(times.offsets.diff(), algorithm.gamma, algorithm.lam_alpha)
    settings = dict(gamma=algorithm.gamma, lam_actor=lam_actor, lam_critic=lam_critic, bootstrap=bootstrap)
    if algorithm.advantage == "turn_gae":
        per_turn, targets = turn_gae(rewards, values, times.turn_offsets, times.sequence_turns, **settings)
        returns = place_on_first_decisions(targets, times.turn_offsets)
        at = kept & times.turn_starts
        return Estimate(repeat(per_turn, times.turn_offsets), returns, _explained(returns[at], values[at]))
    advantages, returns = gae(rewards, values, times.offsets, **settings)
    metrics = _explained(returns[kept], values[kept])
    if algorithm.advantage == "evpo":
        sampled = gae(rewards, values, times.offsets, **settings | {"lam_critic": 1.0})[1]
        seen = (moments(sampled[kept]), moments((sampled - values)[kept]))
        advantages, explained = evpo(advantages, sampled, *seen)
        metrics |= {"evpo/explained_variance": float(explained), "evpo/critic": float(explained > 0)}
    return Estimate(advantages, returns, metrics)


def _explained(returns: torch.Tensor, values: torch.Tensor) -> dict[str, float]:
    return {"critic/explained_variance": float(explained_variance(moments(returns), moments(returns - values)))}


def _from_groups(algorithm: AlgorithmConfig, batch: RolloutBatch, returns: torch.Tensor, included: torch.Tensor):
    """(advantage of each trajectory, float64 [B], metrics)."""
    ids = integer_ids(batch.group_ids).to(returns.device)
    if algorithm.advantage == "batch_mean":
        return groups.batch_mean_baseline(returns, included), {}
    if algorithm.advantage == "vpo":
        returns = set_returns(algorithm, batch, ids, included)
    rules = {"grpo": groups.grpo, "vpo": groups.grpo, "dr_grpo": groups.dr_grpo, "rloo": groups.rloo}
    return rules[algorithm.advantage](returns, ids, included), {}


def set_returns(
    algorithm: AlgorithmConfig, batch: RolloutBatch, ids: torch.Tensor, included: torch.Tensor
) -> torch.Tensor:
    """VPO's R(set) of each trajectory, float64 [B]; 0 where not included.

    A trajectory's answers are the rows of `answer_rewards` in its metadata, or its one `reward_vector`. The draws are a
    function of the group's name, hence the same for all its rollouts, on every rank and after a resume.

    Raises:
        RolloutError: a trajectory has neither, or the number of components differs within a group.
    """
    result = torch.zeros(len(batch), dtype=torch.float64, device=ids.device)
    for group in ids[included].unique():
        rows = ((ids == group) & included).nonzero().squeeze(-1)
        answers = [_answers(batch, int(row)) for row in rows]
        _check_components(batch, rows.tolist(), answers)
        generator = torch.Generator().manual_seed(zlib.crc32(batch.group_ids[int(rows[0])].encode()))
        draws = groups.dirichlet_draws(algorithm.vpo_draws, answers[0].shape[1], generator)
        cut = torch.tensor(np.cumsum([0] + [len(a) for a in answers]))
        result[rows] = groups.set_rewards(torch.cat(answers), cut, draws).to(ids.device)
    return result


def _check_components(batch: RolloutBatch, rows: list[int], answers: list[torch.Tensor]) -> None:
    """One direction w scores all answers of a group: they need the same components."""
    for row, found in zip(rows, answers, strict=True):
        if found.shape[1] != answers[0].shape[1]:
            file, line = batch.sources[row]
            raise RolloutError(
                "reward vectors of one group differ in length", file=file, row=line, field="reward_vector",
                found=found.shape[1], expected=answers[0].shape[1],
            )  # fmt: skip


def _answers(batch: RolloutBatch, row: int) -> torch.Tensor:
    """float64 [answers, R]."""
    recorded = batch.metadata[row].get("answer_rewards") if batch.metadata else None
    if recorded is None and batch.reward_vectors and batch.reward_vectors[row] is not None:
        recorded = [batch.reward_vectors[row]]
    if recorded is None:
        file, line = batch.sources[row]
        raise RolloutError(
            "VPO scores sets of answers by reward vectors, and none is recorded", file=file, row=line,
            field="reward_vector", expected="reward_vector, or answer_rewards in the metadata",
            setting="algorithm.advantage, or a task that records reward vectors",
        )  # fmt: skip
    return torch.as_tensor(np.asarray(recorded, np.float64).reshape(len(recorded), -1))
