"""The row checks behind `validate`: each finds every row that breaks one rule, without a loop over good rows.

Only routes are looped over, one trajectory at a time, so that no more than one is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.rollouts.routes import coverage, missing_rows, required_rows
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, OUTCOMES, RolloutBatch

LOGPROB_SLACK = 1e-5
"""Nats by which a float32 log-softmax may exceed 0 by rounding."""


@dataclass(frozen=True)
class Limits:
    """What the rows are compared with."""

    vocab_size: int
    num_experts: int
    current_version: int
    replay: bool
    missing_boundary: str
    min_route_coverage: float
    route_layers: slice


@dataclass
class Examination:
    """A batch under examination: its decision timeline and the faults found so far."""

    batch: RolloutBatch
    limits: Limits
    faults: list[tuple[int, RolloutError]] = field(default_factory=list)
    """(row of the batch, error), in the order they were found."""
    route_rows: dict[str, int] = field(default_factory=lambda: {"covered": 0, "required": 0})

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [D]: flat raw position of each decision."""
        return np.flatnonzero(self.batch.action_mask)

    @cached_property
    def decision_rows(self) -> np.ndarray:
        """int64 [D]: trajectory of each decision."""
        return np.searchsorted(self.batch.offsets, self.positions, side="right") - 1

    @cached_property
    def decisions(self) -> np.ndarray:
        """int64 [B]: decisions of each trajectory."""
        return np.bincount(self.decision_rows, minlength=len(self.batch))

    @cached_property
    def turns(self) -> np.ndarray:
        """int64 [B]: turns of each trajectory, trusting its turn ids."""
        turns = np.zeros(len(self.batch), np.int64)
        np.maximum.at(turns, self.decision_rows, self.batch.turn_id[self.positions].astype(np.int64) + 1)
        return turns

    @cached_property
    def trained(self) -> np.ndarray:
        """bool [B]: outcomes that may enter a loss. The others need neither routes nor boundary."""
        return np.array([outcome not in EXCLUDED_OUTCOMES for outcome in self.batch.outcome], dtype=bool)

    def add(
        self,
        rows: Iterable[int],
        what: str,
        name: str,
        found: Callable[[int], Any],
        expected: Any,
        *,
        setting: str = "rollout.on_bad_record",
        kind: type[RolloutError] = RolloutError,
    ) -> None:
        """Record one fault for each of `rows`; `found(row)` and a callable `expected(row)` are asked only for them."""
        for row in map(int, rows):
            file, file_row = self.batch.sources[row]
            wanted = expected(row) if callable(expected) else expected
            error = kind(what, file=file, row=file_row, field=name, found=found(row), expected=wanted, setting=setting)
            self.faults.append((row, error))

    def add_values(
        self, bad: np.ndarray, offsets: np.ndarray, what: str, name: str, expected: Any, unit: str = "token", **options
    ) -> None:
        """Record a fault for each row with a flagged value of the flat column `name`; the first one is shown.

        Args:
            bad: bool flags of the flat column that `offsets` `[B+1]` cuts.
        """
        places = np.flatnonzero(bad)
        rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        place = dict(zip(rows.tolist(), places[first].tolist(), strict=True))
        values = getattr(self.batch, name)

        def found(row: int) -> str:
            return f"{values[place[row]]} at {unit} {place[row] - offsets[row]}"

        self.add(rows, what, name, found, expected, **options)


def check_tokens(exam: Examination) -> None:
    """Token and boundary ids lie in [0, V)."""
    batch, size = exam.batch, exam.limits.vocab_size
    for name, offsets in (("tokens", batch.offsets), ("boundary_tokens", batch.boundary_offsets)):
        values = getattr(batch, name)
        outside = (values < 0) | (values >= size)
        exam.add_values(outside, offsets, "token outside the vocabulary", name, f"0..{size - 1}")


def check_action_mask(exam: Examination) -> None:
    """No trajectory begins with a sampled token: nothing precedes it."""
    batch = exam.batch
    nonempty = np.flatnonzero(batch.lengths)
    first = nonempty[batch.action_mask[batch.offsets[nonempty]]]
    exam.add(first, "the first token cannot be sampled", "action_mask", lambda row: "1 at token 0", "0 at token 0")


def check_turns(exam: Examination) -> None:
    """Turn ids are 0, 1, … in order of appearance over decisions and -1 elsewhere; one reward a turn."""
    batch, rows = exam.batch, exam.decision_rows
    ids = batch.turn_id[exam.positions].astype(np.int64)
    opens = np.diff(rows, prepend=-1) != 0
    step = np.diff(ids, prepend=0)
    bad = ~batch.action_mask & (batch.turn_id != -1)
    bad[exam.positions] = np.where(opens, ids != 0, (step != 0) & (step != 1))
    expected = "0, 1, … in order of appearance where action_mask is 1, -1 elsewhere"
    exam.add_values(bad, batch.offsets, "turn ids do not match the mask", "turn_id", expected)
    sound = np.ones(len(batch), bool)
    sound[np.searchsorted(batch.offsets, np.flatnonzero(bad), side="right") - 1] = False
    rewards = np.diff(batch.turn_offsets)
    exam.add(
        np.flatnonzero(sound & (rewards != exam.turns)),
        "number of turn rewards differs from number of turns",
        "turn_rewards",
        lambda row: int(rewards[row]),
        lambda row: int(exam.turns[row]),
    )


def check_numbers(exam: Examination) -> None:
    """Rewards and log-probs are finite, and no log-prob of a decision is positive."""
    batch = exam.batch
    bad_rewards = np.flatnonzero(~np.isfinite(batch.reward))
    exam.add(bad_rewards, "reward is not finite", "reward", lambda row: batch.reward[row], "a finite number")
    exam.add_values(
        ~np.isfinite(batch.turn_rewards),
        batch.turn_offsets,
        "reward is not finite",
        "turn_rewards",
        "finite numbers",
        unit="turn",
    )
    vectors = [row for row, v in enumerate(batch.reward_vectors) if v is not None and not np.isfinite(v).all()]
    exam.add(vectors, "reward is not finite", "reward_vector", lambda row: batch.reward_vectors[row], "finite numbers")
    finite = np.isfinite(batch.logprobs)
    exam.add_values(batch.action_mask & ~finite, batch.offsets, "log-prob is not finite", "logprobs", "finite nats")
    positive = batch.action_mask & finite & (batch.logprobs > LOGPROB_SLACK)
    exam.add_values(positive, batch.offsets, "log-prob is positive", "logprobs", "<= 0 nats")


def check_versions(exam: Examination) -> None:
    """No decision was sampled by a weight version the trainer has not reached, or by a negative one."""
    batch, current = exam.batch, exam.limits.current_version
    outside = batch.action_mask & ((batch.version > current) | (batch.version < 0))
    exam.add_values(
        outside,
        batch.offsets,
        "sampled by a weight version that does not exist yet",
        "version",
        f"0..{current}",
        setting="current_version (resumed from an older checkpoint?)",
    )


def check_ending(exam: Examination) -> None:
    """Never both terminated and truncated; a truncated trajectory says what became visible at its end."""
    batch = exam.batch
    unknown = [row for row, outcome in enumerate(batch.outcome) if outcome not in OUTCOMES]
    exam.add(unknown, "unknown outcome", "outcome", lambda row: batch.outcome[row], ", ".join(OUTCOMES))
    both = np.flatnonzero(batch.terminated & batch.truncated)
    exam.add(both, "both terminated and truncated", "terminated", lambda row: "both", "at most one of them")
    if exam.limits.missing_boundary == "error":
        exam.add(
            np.flatnonzero(missing_boundaries(exam)),
            "truncated without its boundary",
            "boundary_tokens",
            lambda _: "null",
            "the tokens seen after the last decision, [] for none",
            setting="algorithm.missing_boundary",
        )


def missing_boundaries(exam: Examination) -> np.ndarray:
    """bool [B]: truncated trajectories whose bootstrap state is unknown."""
    return exam.batch.truncated & ~exam.batch.boundary_known & exam.trained


def check_routes(exam: Examination) -> None:
    """Ids in range and distinct; where replay is on also presence and coverage."""
    limits = exam.limits
    for row, routes in enumerate(exam.batch.routes):
        begin, end = exam.batch.offsets[row : row + 2]
        mask = exam.batch.action_mask[begin:end]
        if routes is not None and limits.num_experts:
            _check_route_ids(exam, row, routes[limits.route_layers])
        if limits.replay and limits.num_experts and exam.trained[row] and required_rows(mask):
            _check_route_coverage(exam, row, routes, mask)


def _check_route_ids(exam: Examination, row: int, routes: np.ndarray) -> None:
    experts = exam.limits.num_experts
    for offset, layer in enumerate(routes):
        present = ~missing_rows(layer)
        ordered = np.sort(layer, axis=1)
        for bad, what, expected in (
            (ordered[:, -1:] >= experts, "expert id out of range", f"0..{experts - 1}, or a wholly missing row"),
            (ordered[:, 1:] == ordered[:, :-1], "expert id twice in one row", "distinct ids"),
        ):
            tokens = np.flatnonzero(bad.any(axis=1) & present)
            if len(tokens):
                number = (exam.limits.route_layers.start or 0) + offset
                found = f"{layer[tokens[0]].tolist()} at token {tokens[0]} of MoE layer {number}"
                exam.add([row], what, "routes", {row: found}.__getitem__, expected, kind=RouteError)
                return


def _check_route_coverage(exam: Examination, row: int, routes: np.ndarray | None, mask: np.ndarray) -> None:
    limits = exam.limits
    if routes is None:
        exam.add(
            [row],
            "no routes to replay",
            "routes",
            lambda _: "null",
            "recorded routes while replay is on",
            setting="replay.enabled, or the engine's option that returns routed experts",
            kind=RouteError,
        )
        return
    covered, required = coverage(routes[limits.route_layers], mask)
    needed = required * len(covered)
    exam.route_rows["covered"] += int(covered.sum())
    exam.route_rows["required"] += needed
    if covered.sum() < limits.min_route_coverage * needed:
        exam.add(
            [row],
            "too few of the required route rows are recorded",
            "routes",
            lambda _: f"{int(covered.sum())} of {needed} rows x layers",
            f"at least {limits.min_route_coverage:.1%}",
            setting="replay.min_coverage",
            kind=RouteError,
        )


CHECKS = (
    check_tokens,
    check_action_mask,
    check_turns,
    check_numbers,
    check_versions,
    check_ending,
    check_routes,
)
