"""The timeline of a batch: where turns begin, which reward stands on which decision, which trajectories are correct."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import RolloutError
from megatron_rl.methods import Timeline
from megatron_rl.objectives.rewards import place_rewards, soft_overlong_penalty
from megatron_rl.objectives.segments import last_positions
from megatron_rl.rollouts.schema import RolloutBatch


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
    if overlong := algorithm.overlong_penalty:
        lengths = times.offsets.diff()
        penalty = soft_overlong_penalty(lengths, overlong.length, overlong.buffer)
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
