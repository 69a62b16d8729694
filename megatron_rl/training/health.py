"""Whether a run learns at all. One that does not stops with an error: it must not end like one that did.

Counted are the episodes of an iteration that failed (`rollout.max_failed`), and the optimizer steps in a row that
changed nothing (`algorithm.max_skipped_steps`). Verdicts follow from what all ranks know, so all ranks reach the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from megatron_rl.errors import LearningError
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, RolloutBatch


def check_episodes(batch: RolloutBatch, not_started: int, max_failed: float) -> dict[str, float]:
    """Count an iteration's failed episodes, and warn of them.

    Args:
        batch: the iteration's recorded episodes.
        not_started: episodes that were to be played and left nothing to record.
        max_failed: largest share that may fail.

    Returns:
        `rollout/failed`: the share that failed.

    Raises:
        LearningError: more failed; with the first reason, its file and row.
    """
    failed = [row for row in range(len(batch)) if batch.outcome[row] in EXCLUDED_OUTCOMES]
    played, count = len(batch) + not_started, len(failed) + not_started
    if not count:
        return {"rollout/failed": 0.0}
    file, row, reason = None, None, "the environment did not start"
    if failed:
        file, row = batch.sources[failed[0]]
        recorded = batch.metadata[failed[0]].get("error") if batch.metadata else None
        reason = str(recorded or batch.outcome[failed[0]])
    if count > max_failed * played:
        raise LearningError(
            "too many episodes of an iteration failed", file=file, row=row, field="outcome",
            found=f"{count} of {played}, the first: {reason}", expected=f"at most {max_failed:.0%}",
            setting="rollout.max_failed, after the environment or the reward was mended",
        )  # fmt: skip
    warnings.warn(f"{count} of {played} episodes failed and are left out, the first: {reason}", stacklevel=2)
    return {"rollout/failed": count / played}


class SkippedSteps:
    """Counts optimizer steps in a row that changed nothing, of each model.

    Args:
        limit: so many end the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = {"actor": 0, "critic": 0}

    def observe(self, steps: Sequence[Mapping[str, float]]) -> None:
        """Look at the steps of an iteration, in their order.

        Raises:
            LearningError: `limit` steps of a model in a row changed nothing; says why.
        """
        for step in steps:
            for model in self._in_a_row:
                outcome = step.get(f"{model}/stepped", None if f"{model}/skipped" not in step else 0.0)
                if outcome is not None:
                    self._in_a_row[model] = 0 if outcome else self._in_a_row[model] + 1
                if self._in_a_row[model] >= self._limit:
                    raise self._error(model, step)

    def require_one(self, model: str, steps: int) -> None:
        """At the end of a run: the model must have taken a step.

        Args:
            steps: optimizer steps it has completed.

        Raises:
            LearningError: none was, and some were tried.
        """
        if not steps and self._in_a_row[model]:
            raise self._error(model, {f"{model}/skipped": 1.0})

    def _error(self, model: str, step: Mapping[str, float]) -> LearningError:
        nothing_left = f"{model}/skipped" in step
        return LearningError(
            f"{self._in_a_row[model]} optimizer steps of the {model} in a row changed nothing",
            found="no decision was left in them" if nothing_left else "gradients that are not finite",
            expected="steps that learn",
            setting="what removes decisions (rejection, veto, stale_decisions, overlong_filter, dynamic_sampling), or "
            "algorithm.max_skipped_steps"
            if nothing_left
            else "rewards, learning rates or coefficients, or algorithm.max_skipped_steps",
        )
