"""From recorded files to the iteration's batch: every rank maps them, the ranks check disjoint rows and agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.errors import MegatronRLError, RolloutError
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch
from megatron_rl.rollouts.store import read_batch, select_rows
from megatron_rl.rollouts.validate import ValidationReport, validate

UNKNOWN_TOKENIZER = ""
"""Tokenizer hash of a fingerprint made without a task: whatever was recorded is accepted."""


_Verdict = tuple[list[int], MegatronRLError | None, ValidationReport | None]
"""Of one rank: rows it keeps, the error that ends the run, its report."""


def load_validated(
    config: RunConfig, directory: Path, expected: ModelFingerprint, version: int
) -> tuple[RolloutBatch, list[ValidationReport]]:
    """Map an iteration's shards and validate them. Ranks check disjoint rows and share the verdict.

    Raises:
        RolloutError, RouteError: the same error on every rank, the first in row order.
    """
    damaged: list[RolloutError] | None = [] if config.rollout.on_bad_record == "quarantine" else None
    batch = read_batch(directory, verify_checksums=dist.get_rank() == 0, refused=damaged)
    return validated(config, batch, expected, version, directory, damaged or ())


def validated(
    config: RunConfig,
    batch: RolloutBatch,
    expected: ModelFingerprint,
    version: int,
    directory: Path,
    damaged: Sequence[RolloutError] = (),
) -> tuple[RolloutBatch, list[ValidationReport]]:
    """Validate a batch that is read already; the trajectories that are kept, and every rank's report. Collective.

    Args:
        config: its rules.
        batch: the same on every rank.
        expected: whose rollouts are accepted.
        version: weight version of the trainer; tokens of a later one are refused.
        directory: where a quarantine lies, and what errors name.
        damaged: rows that could not be read.

    Raises:
        RolloutError, RouteError: the same error on every rank, the first in row order.
    """
    mine = np.arange(dist.get_rank(), len(batch), dist.get_world_size())
    verdict: _Verdict
    try:
        checked = validate(
            select_rows(batch, mine),
            expected=_known(expected, batch),
            replay=config.replay.enabled,
            current_version=version,
            temperature=config.rollout.temperature,
            missing_boundary=config.algorithm.missing_boundary,
            on_bad_record=config.rollout.on_bad_record,
            quarantine_dir=directory / "quarantine",
            min_route_coverage=config.replay.min_coverage,
            already_refused=damaged if dist.get_rank() == 0 else (),
        )
        verdict = (mine[checked.kept].tolist(), None, checked.report)
    except MegatronRLError as error:
        verdict = ([], error, None)
    gathered: list[_Verdict | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, verdict)
    verdicts = [found for found in gathered if found is not None]
    for _, fault, _ in verdicts:
        if fault is not None:
            raise fault
    kept = np.array(sorted(row for rows, _, _ in verdicts for row in rows), np.int64)
    if not len(kept):
        raise RolloutError("no trajectory of this iteration passed validation", file=directory)
    return select_rows(batch, kept), [report for _, _, report in verdicts if report is not None]


def _known(expected: ModelFingerprint, batch: RolloutBatch) -> ModelFingerprint:
    if expected.tokenizer_hash != UNKNOWN_TOKENIZER:
        return expected
    return replace(expected, tokenizer_hash=batch.header.fingerprint.tokenizer_hash)
