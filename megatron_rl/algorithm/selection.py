"""Which trajectories of a batch a group method can learn from. Pure functions of the batch: ranks agree without
talking."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.batching import decision_offsets
from megatron_rl.config import AlgorithmConfig, RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.objectives.groups import dynamic_sampling_keep
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, RolloutBatch


class Selection(NamedTuple):
    """What remains of a batch."""

    rows: np.ndarray
    """int64, ascending: trajectories that may enter a loss."""
    metrics: dict[str, float]
    """What was dropped."""


def trainable_rows(batch: RolloutBatch) -> np.ndarray:
    """Trajectories with a decision and an outcome that may enter a loss, int64."""
    decisions = np.diff(decision_offsets(batch.action_mask, batch.offsets))
    allowed = np.array([outcome not in EXCLUDED_OUTCOMES for outcome in batch.outcome], bool)
    return np.flatnonzero((decisions > 0) & allowed)


def integer_ids(names: tuple[str, ...]) -> torch.Tensor:
    """int64 [B]: equal names have equal numbers."""
    return torch.as_tensor(np.unique(np.asarray(names), return_inverse=True)[1].reshape(-1))


def total_rewards(batch: RolloutBatch) -> np.ndarray:
    """float64 [B]: terminal reward plus the feedback of all turns, before any shaping."""
    feedback = np.concatenate([[0.0], np.cumsum(np.asarray(batch.turn_rewards, np.float64))])[batch.turn_offsets]
    return np.asarray(batch.reward, np.float64) + np.diff(feedback)


def select(algorithm: AlgorithmConfig, batch: RolloutBatch) -> Selection:
    """Drop what teaches nothing: groups of equal rewards under dynamic sampling, responses alone in their group under
    leave-one-out.

    Raises:
        ConfigError: groups are to be compared, and no group of the batch has two responses.
    """
    rows = trainable_rows(batch)
    if not algorithm.needs_groups or not len(rows):
        return Selection(rows, {})
    groups = integer_ids(batch.group_ids)[rows]
    sizes = torch.bincount(groups)[groups]
    if int(sizes.max()) < 2:
        raise ConfigError(
            "every group has one response, and the objective compares responses of a group",
            field="group_id",
            found=f"{len(rows)} groups of 1",
            expected="at least two responses to a prompt",
            setting="the task's responses per prompt (rollout.environment_options.maps_per_prompt of frozen_lake), or "
            "algorithm.estimator",
        )
    metrics = {"sampling/group_size": float(sizes.double().mean())}
    if algorithm.estimator.leaves_out_alone:
        alone = (sizes < 2).numpy()
        metrics["sampling/alone"] = float(alone.sum())
        rows, groups = rows[~alone], groups[torch.as_tensor(~alone)]
    if algorithm.dynamic_sampling:
        keep = dynamic_sampling_keep(torch.as_tensor(total_rewards(batch)[rows]), groups)
        metrics["sampling/uniform_groups"] = float(len(groups[~keep].unique()))
        metrics["sampling/informative"] = float(keep.sum())
        rows = rows[keep.numpy()]
    return Selection(rows, metrics)


def episodes_to_refill(config: RunConfig, batch: RolloutBatch) -> int:
    """Episodes that a further round of dynamic sampling should play, whole groups; 0: there are enough.

    Args:
        batch: all that the iteration has played so far.
    """
    chosen = select(config.algorithm, batch)
    size = max(1, round(chosen.metrics.get("sampling/group_size", 1.0)))
    return -(-max(config.rollout.episodes - len(chosen.rows), 0) // size) * size
