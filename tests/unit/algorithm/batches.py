"""Recorded batches made by hand: every trajectory says how many decisions its turns have, and little else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, RolloutHeader, SamplingTruth


def batch_of(
    turns: Sequence[Sequence[int]],
    rewards: Sequence[float],
    groups: Sequence[str],
    *,
    outcomes: Sequence[str] | None = None,
    truncated: Sequence[bool] | None = None,
    known: Sequence[bool] | None = None,
    metadata: Sequence[dict] | None = None,
    vectors: Sequence[Sequence[float] | None] = (),
    feedback: Sequence[Sequence[float]] | None = None,
) -> RolloutBatch:
    """Trajectory i: an observation token before each of its turns, turn k of `turns[i][k]` decisions.

    Args:
        turns: decisions of each turn of each trajectory.
        rewards, groups, outcomes, truncated, metadata, vectors: one a trajectory.
        known: whether the boundary is.
        feedback: reward of each turn.
    """
    rows = range(len(turns))
    mask = [np.concatenate([[False], *([False] + [True] * n for n in counts)]).astype(bool) for counts in turns]
    ids = [np.concatenate([[-1], *([-1] + [k] * n for k, n in enumerate(counts))]) for counts in turns]
    offsets = np.concatenate([[0], np.cumsum([len(m) for m in mask])]).astype(np.int64)
    truncated = np.array([False] * len(turns) if truncated is None else truncated)
    feedback = [[0.0] * len(counts) for counts in turns] if feedback is None else feedback
    fingerprint = ModelFingerprint("none", 9, 0, 0, (), "none")
    return RolloutBatch(
        header=RolloutHeader(fingerprint, SamplingTruth(), "none"),
        trajectory_ids=tuple(f"t{i}" for i in rows), prompt_ids=tuple(groups), group_ids=tuple(groups),
        offsets=offsets, tokens=np.arange(offsets[-1], dtype=np.int32) % 9, action_mask=np.concatenate(mask),
        turn_id=np.concatenate(ids).astype(np.int16), logprobs=np.full(offsets[-1], -1.0, np.float32),
        version=np.zeros(offsets[-1], np.int32),
        turn_offsets=np.concatenate([[0], np.cumsum([len(counts) for counts in turns])]).astype(np.int64),
        turn_rewards=np.concatenate([*map(np.asarray, feedback), []]).astype(np.float32),
        reward=np.asarray(rewards, np.float32), outcome=tuple(outcomes or ["completed"] * len(turns)),
        terminated=~truncated, truncated=truncated, boundary_offsets=np.zeros(len(turns) + 1, np.int64),
        boundary_tokens=np.empty(0, np.int32), boundary_known=np.array([True] * len(turns) if known is None else known),
        routes=(None,) * len(turns), sources=tuple(("memory", i) for i in rows), metadata=tuple(metadata or ()),
        reward_vectors=tuple(None if v is None else np.asarray(v, np.float32) for v in vectors),
    )  # fmt: skip
