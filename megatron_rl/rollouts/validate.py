"""The only entrance to training: nothing reaches a loss without passing `validate`.

Faults come in two kinds. A *header* fault (another model, log-probs that are not those of the sampling distribution)
concerns the whole batch and is always raised. A *row* fault concerns one trajectory and follows `on_bad_record`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_rl.errors import ConfigError, RolloutError, RouteError
from megatron_rl.rollouts._checks import CHECKS, Examination, Limits, missing_boundaries
from megatron_rl.rollouts._quarantine import quarantine
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, RolloutHeader
from megatron_rl.rollouts.store import select_rows

_ROUTE_FIELDS = frozenset({"num_experts", "topk", "moe_layers"})
MissingBoundary = Literal["error", "drop", "zero"]
OnBadRecord = Literal["error", "quarantine"]
ANY_VERSION = int(np.iinfo(np.int32).max)
"""`current_version` of whoever refuses no token as too new: nothing is trained, or another run counted the versions."""


@dataclass(frozen=True)
class ValidationReport:
    """Counts of one validated batch. Trajectories read = kept + refused + dropped."""

    read: int
    """Trajectories, structurally damaged ones included."""
    kept: int
    refused: tuple[RolloutError, ...]
    """The first fault of each refused row."""
    dropped: int
    """Truncated without boundary, under `missing_boundary = drop`."""
    boundary_zero: int
    """Truncated without boundary, kept with a successor value of 0 (`missing_boundary = zero`)."""
    outcomes: dict[str, int]
    """Kept trajectories by outcome."""
    decisions: int
    """Decisions D of the kept trajectories."""
    turns: int
    """Turns K of the kept trajectories."""
    required_route_rows: int
    """Rows x layers that replay needs (in `route_layers`), refused trajectories included."""
    covered_route_rows: int
    """Those of them that were recorded; the rest falls back to native routing."""
    quarantine_files: tuple[str, ...]
    """Side shards holding the refused rows and why."""

    @property
    def route_coverage(self) -> float:
        """Fraction of required route rows recorded; 1 where none is required."""
        return self.covered_route_rows / self.required_route_rows if self.required_route_rows else 1.0

    @property
    def empty(self) -> bool:
        """No decision anywhere: the caller takes no optimiser step."""
        return self.decisions == 0


@dataclass(frozen=True)
class ValidatedRollouts:
    """Trajectories fit for training. Written by `validate`, read by `training.score` and `batching`."""

    batch: RolloutBatch
    """Kept trajectories, in their order. Where `truncated` and not `boundary_known`, the successor value is 0."""
    kept: np.ndarray
    """int64 [B]: rows of the batch given to `validate`."""
    report: ValidationReport


def validate(
    batch: RolloutBatch,
    *,
    expected: ModelFingerprint,
    replay: bool,
    current_version: int,
    temperature: float,
    missing_boundary: MissingBoundary = "error",
    on_bad_record: OnBadRecord = "error",
    quarantine_dir: str | Path | None = None,
    min_route_coverage: float = 0.9,
    route_layers: slice = slice(None),
    already_refused: Sequence[RolloutError] = (),
) -> ValidatedRollouts:
    """Check every trajectory of a batch and keep the sound ones.

    Args:
        expected: the model being trained.
        replay: recorded routes will be replayed, so they must be there (outcomes that never enter a loss excepted).
        current_version: weight version of the trainer; tokens of a later one are refused.
        temperature: what the trainer divides logits by; must be the sampling temperature.
        missing_boundary: truncated trajectories with unknown boundary are row faults, left out, or kept with a
            successor value of 0 (warned about once).
        on_bad_record: raise the first row fault, or leave bad rows out and copy them to a side shard.
        quarantine_dir: where side shards go; default `quarantine/` beside each source shard.
        min_route_coverage: smallest fraction of the required route rows x layers, per trajectory.
        route_layers: route rows l whose ids are examined, so that a pipeline stage reads only its own bytes. Verdicts
            can then differ between stages: agree on them before use.
        already_refused: structural faults that `read_batch(refused=…)` collected.

    Raises:
        RolloutError, RouteError: a header fault; a row fault under `on_bad_record = error`.
        ConfigError: an unknown policy.
    """
    _check_policies(missing_boundary, on_bad_record)
    for error in header_faults(batch.header, expected=expected, temperature=temperature, file=_first_file(batch)):
        raise error
    limits = Limits(
        vocab_size=expected.vocab_size,
        num_experts=expected.num_experts,
        current_version=current_version,
        replay=replay,
        missing_boundary=missing_boundary,
        min_route_coverage=min_route_coverage,
        route_layers=route_layers,
    )
    exam = examine(batch, limits)
    refused = [*already_refused, *_first_of_each_row(exam)]
    if refused and on_bad_record == "error":
        raise refused[0]
    return _keep(exam, refused, quarantine(refused, quarantine_dir))


def _check_policies(missing_boundary: str, on_bad_record: str) -> None:
    for setting, value, allowed in (
        ("algorithm.missing_boundary", missing_boundary, ("error", "drop", "zero")),
        ("rollout.on_bad_record", on_bad_record, ("error", "quarantine")),
    ):
        if value not in allowed:
            raise ConfigError("unknown policy", found=value, expected=" | ".join(allowed), setting=setting)


def _first_file(batch: RolloutBatch) -> str | None:
    return batch.sources[0][0] if batch.sources else None


def examine(batch: RolloutBatch, limits: Limits) -> Examination:
    """Run every row check; the faults are on the result, several for one row where there are several."""
    exam = Examination(batch, limits)
    for check in CHECKS:
        check(exam)
    return exam


def _first_of_each_row(exam: Examination) -> list[RolloutError]:
    first: dict[int, RolloutError] = {}
    for row, error in exam.faults:
        first.setdefault(row, error)
    return [first[row] for row in sorted(first)]


def _keep(exam: Examination, refused: list[RolloutError], quarantine_files: tuple[str, ...]) -> ValidatedRollouts:
    sound = np.ones(len(exam.batch), bool)
    sound[[row for row, _ in exam.faults]] = False
    unknown = missing_boundaries(exam) & sound
    drop = exam.limits.missing_boundary == "drop"
    if exam.limits.missing_boundary == "zero" and unknown.any():
        warnings.warn("truncated trajectories without boundary bootstrap from 0", stacklevel=3)
    kept = np.flatnonzero(sound & ~(unknown & drop))
    already = len(refused) - int((~sound).sum())
    report = ValidationReport(
        read=len(exam.batch) + already,
        kept=len(kept),
        refused=tuple(refused),
        dropped=int(unknown.sum()) if drop else 0,
        boundary_zero=0 if drop else int(unknown.sum()),
        outcomes=dict(Counter(exam.batch.outcome[row] for row in kept)),
        decisions=int(exam.decisions[kept].sum()),
        turns=int(exam.turns[kept].sum()),
        required_route_rows=exam.route_rows["required"],
        covered_route_rows=exam.route_rows["covered"],
        quarantine_files=quarantine_files,
    )
    return ValidatedRollouts(select_rows(exam.batch, kept), kept, report)


def header_faults(
    header: RolloutHeader, *, expected: ModelFingerprint, temperature: float, file: str | None = None
) -> list[RolloutError]:
    """Every way in which a shard's header rules out training this model on it."""
    return [*_fingerprint_faults(header.fingerprint, expected, file), *_sampling_faults(header, temperature, file)]


def _fingerprint_faults(found: ModelFingerprint, expected: ModelFingerprint, file: str | None) -> list[RolloutError]:
    ours, theirs = asdict(expected), asdict(found)
    return [
        (RouteError if name in _ROUTE_FIELDS else RolloutError)(
            "rollout of another model",
            file=file,
            field=f"fingerprint.{name}",
            found=theirs[name],
            expected=ours[name],
            setting="the rollout directory, or the model",
        )
        for name in ours
        if ours[name] != theirs[name]
    ]


def _sampling_faults(header: RolloutHeader, temperature: float, file: str | None) -> list[RolloutError]:
    sampling = header.sampling
    faults = []

    def fault(what: str, name: str, found: object, expected: object, setting: str) -> None:
        faults.append(
            RolloutError(what, file=file, field=f"sampling.{name}", found=found, expected=expected, setting=setting)
        )

    if not 0 < sampling.temperature < float("inf"):
        fault("no such sampling distribution", "temperature", sampling.temperature, "> 0", "the engine's temperature")
    if temperature != sampling.temperature:
        fault("trainer and sampler temperature differ", "temperature", sampling.temperature, temperature, "temperature")
    if sampling.logprobs not in ("processed", "raw"):
        fault(
            "unknown kind of log-probs", "logprobs", sampling.logprobs, "processed | raw", "the engine's logprobs mode"
        )
    if sampling.logprobs == "raw" and sampling.temperature != 1.0:
        found = f"raw at temperature {sampling.temperature}"
        fault("raw log-probs are not the sampler's", "logprobs", found, "processed", "the engine's logprobs mode")
    if sampling.top_p < 1.0:
        fault("sampling was restricted", "top_p", sampling.top_p, "1.0 (kept tokens are not recorded)", "top_p")
    if sampling.top_k > 0:
        fault("sampling was restricted", "top_k", sampling.top_k, "0 (kept tokens are not recorded)", "top_k")
    return faults
