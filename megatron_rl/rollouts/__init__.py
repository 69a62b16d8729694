"""Recorded rollouts: what happened, as records, files and checks. No distributed code, no model."""

from __future__ import annotations

from megatron_rl.rollouts.schema import (
    EXCLUDED_OUTCOMES,
    FORMAT_VERSION,
    OUTCOMES,
    ModelFingerprint,
    RolloutBatch,
    RolloutHeader,
    SamplingTruth,
    Trajectory,
)
from megatron_rl.rollouts.store import ShardInfo, read_batch, read_manifest, select_rows, trajectory_at, write_shard
from megatron_rl.rollouts.validate import ValidatedRollouts, ValidationReport, validate

__all__ = [
    "EXCLUDED_OUTCOMES",
    "FORMAT_VERSION",
    "OUTCOMES",
    "ModelFingerprint",
    "RolloutBatch",
    "RolloutHeader",
    "SamplingTruth",
    "ShardInfo",
    "Trajectory",
    "ValidatedRollouts",
    "ValidationReport",
    "read_batch",
    "read_manifest",
    "select_rows",
    "trajectory_at",
    "validate",
    "write_shard",
]
