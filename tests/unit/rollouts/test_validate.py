"""The entrance to training: one test a bad input, each asserting what the error says."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError, RolloutError, RouteError
from megatron_rl.rollouts import (
    RolloutHeader,
    SamplingTruth,
    Trajectory,
    ValidatedRollouts,
    read_batch,
    select_rows,
    trajectory_at,
    validate,
    write_shard,
)
from tests.unit.rollouts.records import (
    HEADER,
    MODEL,
    assert_same,
    changed,
    routes_for,
    sound,
    without_decisions,
    write_tampered,
)

DEFAULTS: dict[str, Any] = {"expected": MODEL, "replay": True, "current_version": 3, "temperature": 1.0}


def check(directory: Path, rows: list[Trajectory], header: RolloutHeader = HEADER, **options: Any) -> ValidatedRollouts:
    write_shard(directory, header, rows, name="shard")
    return validate(read_batch(directory), **{**DEFAULTS, **options})


def test_sound_rows_pass_untouched(tmp_path: Path) -> None:
    rows = [sound(0), sound(1, terminated=False, truncated=True, boundary_tokens=np.empty(0, np.int32)), sound(2)]
    result = check(tmp_path, rows)
    assert result.kept.tolist() == [0, 1, 2]
    for row, trajectory in enumerate(rows):
        assert_same(trajectory_at(result.batch, row), trajectory)
    report = result.report
    assert (report.read, report.kept, report.refused, report.dropped) == (3, 3, (), 0)
    assert (report.decisions, report.turns, report.outcomes) == (9, 6, {"completed": 3})
    # The last decision is token 5: rows 0..4 in each of 3 layers of 3 trajectories.
    assert (report.covered_route_rows, report.required_route_rows, report.route_coverage) == (45, 45, 1.0)
    assert not report.empty


BASE = sound(1)
MISSING = np.full(2, 255, np.uint8)
BAD_ROWS = {
    "token too large": ({"tokens": changed(BASE.tokens, 4, 32)}, "tokens", "32 at token 4", "0..31"),
    "token negative": ({"tokens": changed(BASE.tokens, 0, -1)}, "tokens", "-1 at token 0", "0..31"),
    "boundary token": (
        {"boundary_tokens": np.array([1, 40], np.int32)},
        "boundary_tokens",
        "40 at token 1",
        "0..31",
    ),
    "mask at 0": (
        {"action_mask": changed(BASE.action_mask, 0, True), "turn_id": changed(BASE.turn_id, 0, 0)},
        "action_mask",
        "1 at token 0",
        "0 at token 0",
    ),
    "turn without mask": ({"turn_id": changed(BASE.turn_id, 4, 0)}, "turn_id", "0 at token 4", None),
    "mask without turn": ({"turn_id": changed(BASE.turn_id, 3, -1)}, "turn_id", "-1 at token 3", None),
    "turns start at 1": (
        {"turn_id": np.where(BASE.action_mask, 1, -1).astype(np.int16)},
        "turn_id",
        "1 at token 2",
        None,
    ),
    "turn skipped": ({"turn_id": changed(BASE.turn_id, 5, 2)}, "turn_id", "2 at token 5", None),
    "turn goes back": ({"turn_id": changed(BASE.turn_id, [3, 5], [1, 0])}, "turn_id", "0 at token 5", None),
    "turn reward missing": ({"turn_rewards": np.zeros(1, np.float32)}, "turn_rewards", 1, 2),
    "turn reward too many": ({"turn_rewards": np.zeros(3, np.float32)}, "turn_rewards", 3, 2),
    "turn reward NaN": (
        {"turn_rewards": np.array([0, np.nan], np.float32)},
        "turn_rewards",
        "nan at turn 1",
        "finite numbers",
    ),
    "reward NaN": ({"reward": float("nan")}, "reward", None, "a finite number"),
    "reward infinite": ({"reward": float("-inf")}, "reward", -np.inf, "a finite number"),
    "reward component NaN": (
        {"reward_vector": np.array([np.nan], np.float32)},
        "reward_vector",
        None,
        "finite numbers",
    ),
    "log-prob NaN": ({"logprobs": changed(BASE.logprobs, 3, np.nan)}, "logprobs", "nan at token 3", "finite nats"),
    "log-prob -inf": ({"logprobs": changed(BASE.logprobs, 5, -np.inf)}, "logprobs", "-inf at token 5", "finite nats"),
    "log-prob positive": ({"logprobs": changed(BASE.logprobs, 2, 0.5)}, "logprobs", "0.5 at token 2", "<= 0 nats"),
    "future version": ({"version": changed(BASE.version, 5, 4)}, "version", "4 at token 5", "0..3"),
    "negative version": ({"version": changed(BASE.version, 5, -1)}, "version", "-1 at token 5", "0..3"),
    "both endings": ({"truncated": True, "boundary_tokens": np.empty(0, np.int32)}, "terminated", "both", None),
    "boundary unknown": ({"terminated": False, "truncated": True}, "boundary_tokens", "null", None),
}
BAD_ROUTES = {
    "absent": ({"routes": None}, "null", "recorded routes while replay is on"),
    "twice": ({"routes": changed(BASE.routes, (1, 2), 5)}, "[5, 5] at token 2 of MoE layer 1", "distinct ids"),
    "too large": ({"routes": changed(BASE.routes, (2, 5), [0, 8])}, "[0, 8] at token 5 of MoE layer 2", None),
    "partly missing": ({"routes": changed(BASE.routes, (0, 0), [0, 255])}, "[0, 255] at token 0 of MoE layer 0", None),
    "uncovered": (
        {"routes": changed(BASE.routes, (slice(None), slice(0, 1)), MISSING)},
        "12 of 15 rows x layers",
        "at least 90.0%",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row(tmp_path: Path, name: str) -> None:
    change, field, found, expected = BAD_ROWS[name]
    with pytest.raises(RolloutError) as caught:
        check(tmp_path, [sound(0), sound(1, **change)])
    error = caught.value
    assert (error.file, error.row, error.field) == (str(tmp_path / "shard.arrow"), 1, field)
    assert found is None or error.found == found
    assert error.expected is not None and expected in (None, error.expected)
    assert error.setting


@pytest.mark.parametrize("name", BAD_ROUTES)
def test_bad_routes(tmp_path: Path, name: str) -> None:
    change, found, expected = BAD_ROUTES[name]
    with pytest.raises(RouteError) as caught:
        check(tmp_path, [sound(0), sound(1, **change)])
    error = caught.value
    assert (error.file, error.row, error.field, error.found) == (str(tmp_path / "shard.arrow"), 1, "routes", found)
    assert error.expected is not None and expected in (None, error.expected)


def test_unknown_outcome(tmp_path: Path) -> None:
    path = write_tampered(tmp_path, "outcome", {1: "fine"})
    with pytest.raises(RolloutError) as caught:
        validate(read_batch(tmp_path), **DEFAULTS)
    error = caught.value
    assert (error.file, error.row, error.field, error.found) == (str(path), 1, "outcome", "fine")
    assert "completed" in error.expected


def sampled(**changes: Any) -> RolloutHeader:
    return replace(HEADER, sampling=replace(SamplingTruth(), **changes))


@pytest.mark.parametrize(
    ("header", "options", "field", "found", "expected"),
    [
        (sampled(top_p=0.9), {}, "sampling.top_p", 0.9, "1.0 (kept tokens are not recorded)"),
        (sampled(top_k=20), {}, "sampling.top_k", 20, "0 (kept tokens are not recorded)"),
        (
            sampled(logprobs="raw", temperature=0.7),
            {"temperature": 0.7},
            "sampling.logprobs",
            "raw at temperature 0.7",
            "processed",
        ),
        (sampled(temperature=0.7), {}, "sampling.temperature", 0.7, 1.0),
        (sampled(temperature=0.0), {"temperature": 0.0}, "sampling.temperature", 0.0, "> 0"),
        (sampled(logprobs="other"), {}, "sampling.logprobs", "other", "processed | raw"),
        (HEADER, {"expected": replace(MODEL, tokenizer_hash="xyz")}, "fingerprint.tokenizer_hash", "abc", "xyz"),
        (HEADER, {"expected": replace(MODEL, architecture="other")}, "fingerprint.architecture", "toy_moe", "other"),
    ],
)
def test_header_faults_are_raised_whatever_the_policy(
    tmp_path: Path, header: RolloutHeader, options: dict, field: str, found: object, expected: object
) -> None:
    with pytest.raises(RolloutError) as caught:
        check(tmp_path, [sound()], header, on_bad_record="quarantine", **options)
    error = caught.value
    assert (error.file, error.field, error.found) == (str(tmp_path / "shard.arrow"), field, found)
    assert (error.expected, bool(error.setting)) == (expected, True)


@pytest.mark.parametrize(("name", "value"), [("num_experts", 16), ("topk", 4), ("moe_layers", (0, 1, 2))])
def test_routes_of_another_model(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(RouteError) as caught:
        check(tmp_path, [sound()], expected=replace(MODEL, **{name: value}))
    assert (caught.value.field, caught.value.found) == (f"fingerprint.{name}", getattr(MODEL, name))
    assert caught.value.expected == value


def test_raw_logprobs_at_temperature_one_and_processed_ones_at_another_are_behaviour(tmp_path: Path) -> None:
    assert check(tmp_path / "raw", [sound()], sampled(logprobs="raw")).report.kept == 1
    assert check(tmp_path / "hot", [sound()], sampled(temperature=1.2), temperature=1.2).report.kept == 1


def test_values_off_the_mask_are_ignored(tmp_path: Path) -> None:
    nonsense = {
        "logprobs": changed(BASE.logprobs, [0, 4], [np.nan, 7.0]),
        "version": changed(BASE.version, [0, 4], [-9, 99]),
    }
    assert check(tmp_path, [sound(1, **nonsense)]).report.kept == 1


def test_a_turn_is_what_its_id_says_not_a_run_of_the_mask(tmp_path: Path) -> None:
    one_turn = np.where(BASE.action_mask, 0, -1).astype(np.int16)
    split = changed(BASE.turn_id, [3, 5], [1, 2])  # the first run holds two turns
    rewards = np.zeros(3, np.float32)
    rows = [sound(0, turn_id=one_turn, turn_rewards=rewards[:1]), sound(1, turn_id=split, turn_rewards=rewards)]
    assert check(tmp_path, rows).report.turns == 4


# -- policies


def test_quarantine_keeps_the_sound_and_stores_the_rest_with_the_reason(tmp_path: Path) -> None:
    bad = sound(1, reward=float("nan"), tokens=changed(BASE.tokens, 0, 99))
    options = {**DEFAULTS, "on_bad_record": "quarantine", "quarantine_dir": tmp_path / "q"}
    write_shard(tmp_path, HEADER, [sound(0), bad, sound(2)], name="shard")
    results = [validate(read_batch(tmp_path), **options) for _ in range(2)]  # the second replaces the side shard
    for result in results:
        assert result.kept.tolist() == [0, 2]
        assert_same(trajectory_at(result.batch, 1), sound(2))
        (error,) = result.report.refused
        assert (error.row, error.field, result.report.read, result.report.kept) == (1, "tokens", 3, 2)
        (side,) = result.report.quarantine_files
        (row,) = pa.ipc.open_file(Path(side).read_bytes()).read_all().to_pylist()
        assert (row["source_file"], row["source_row"]) == (str(tmp_path / "shard.arrow"), 1)
        assert row["reason"] == str(error)
    assert results[0].report.quarantine_files == results[1].report.quarantine_files
    assert_same(trajectory_at(read_batch(tmp_path / "q"), 0), bad)


def test_ranks_that_check_disjoint_rows_of_a_shard_keep_each_others_quarantine(tmp_path: Path) -> None:
    bad = [sound(number, reward=float("inf")) for number in range(4)]
    write_shard(tmp_path, HEADER, bad, name="shard")
    batch = read_batch(tmp_path)
    for rows in ([0, 2], [1, 3]):
        report = validate(select_rows(batch, rows), **DEFAULTS, on_bad_record="quarantine").report
        assert (report.kept, report.empty) == (0, True)
    kept = read_batch(tmp_path / "quarantine")
    assert sorted(kept.trajectory_ids) == [f"trajectory-{number}" for number in range(4)]


def test_structurally_damaged_rows_are_quarantined_too(tmp_path: Path) -> None:
    path = write_tampered(tmp_path, "version", {1: [0, 0]})
    refused: list[RolloutError] = []
    batch = read_batch(tmp_path, refused=refused)
    with pytest.raises(RolloutError) as caught:
        validate(batch, **DEFAULTS, already_refused=refused)
    assert caught.value.row == 1
    result = validate(batch, **DEFAULTS, already_refused=refused, on_bad_record="quarantine")
    assert (result.report.read, result.report.kept, len(result.report.refused)) == (3, 2, 1)
    (side,) = result.report.quarantine_files
    assert Path(side).parent == tmp_path / "quarantine"
    (row,) = pa.ipc.open_file(Path(side).read_bytes()).read_all().to_pylist()
    assert (row["version"], row["source_row"], row["source_file"]) == ([0, 0], 1, str(path))


CUT = {"terminated": False, "truncated": True, "outcome": "truncated_length"}


def test_missing_boundary_policies(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(0), sound(1, **CUT)], name="shard")
    batch = read_batch(tmp_path)
    with pytest.raises(RolloutError) as caught:
        validate(batch, **DEFAULTS)
    assert (caught.value.row, caught.value.setting) == (1, "algorithm.missing_boundary")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropped = validate(batch, **DEFAULTS, missing_boundary="drop")
    assert (dropped.kept.tolist(), dropped.report.dropped, dropped.report.boundary_zero) == ([0], 1, 0)
    with pytest.warns(UserWarning, match="bootstrap from 0"):
        zero = validate(batch, **DEFAULTS, missing_boundary="zero")
    assert (zero.kept.tolist(), zero.report.dropped, zero.report.boundary_zero) == ([0, 1], 0, 1)
    assert zero.report.outcomes == {"completed": 1, "truncated_length": 1}


def test_outcomes_that_never_train_need_neither_routes_nor_boundary(tmp_path: Path) -> None:
    rows = [sound(0), sound(1, **{**CUT, "outcome": "aborted"}, routes=None)]
    assert check(tmp_path, rows).report.kept == 2


def test_uncovered_rows_are_counted_and_tolerated_on_request(tmp_path: Path) -> None:
    rows = [sound(1, **BAD_ROUTES["uncovered"][0])]
    report = check(tmp_path, rows, min_route_coverage=0.8).report
    assert (report.covered_route_rows, report.required_route_rows, report.route_coverage) == (12, 15, 0.8)


def test_rows_after_the_last_decision_are_not_required(tmp_path: Path) -> None:
    tail = changed(BASE.routes, (slice(None), slice(5, 6)), MISSING)
    assert check(tmp_path, [sound(1, routes=tail)], min_route_coverage=1.0).report.route_coverage == 1.0


def test_without_replay_routes_may_be_absent_but_not_damaged(tmp_path: Path) -> None:
    assert check(tmp_path / "a", [sound(routes=None)], replay=False).report.kept == 1
    with pytest.raises(RouteError):
        check(tmp_path / "b", [sound(1, **BAD_ROUTES["twice"][0])], replay=False)


def test_a_stage_examines_only_its_own_layers(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(1, **BAD_ROUTES["twice"][0])], name="shard")  # in layer 1
    batch = read_batch(tmp_path)
    report = validate(batch, **DEFAULTS, route_layers=slice(2, 3)).report
    assert (report.kept, report.required_route_rows) == (1, 5)
    with pytest.raises(RouteError) as caught:
        validate(batch, **DEFAULTS, route_layers=slice(1, 2))
    assert caught.value.found == "[5, 5] at token 2 of MoE layer 1"


def test_wide_ids(tmp_path: Path) -> None:
    model = replace(MODEL, num_experts=300)
    header = replace(HEADER, fingerprint=model)
    routes = routes_for(7, model)
    assert check(tmp_path / "a", [sound(routes=routes)], header, expected=model).report.kept == 1
    with pytest.raises(RouteError) as caught:
        bad = changed(routes, (0, 1), [1, 300])
        check(tmp_path / "b", [sound(routes=bad)], header, expected=model)
    assert caught.value.found == "[1, 300] at token 1 of MoE layer 0"


def test_dense_models_replay_nothing(tmp_path: Path) -> None:
    model = replace(MODEL, num_experts=0, topk=0, moe_layers=())
    header = replace(HEADER, fingerprint=model)
    assert check(tmp_path, [sound(routes=None)], header, expected=model).report.kept == 1


def test_no_decision_anywhere_is_reported_not_raised(tmp_path: Path) -> None:
    report = check(tmp_path / "a", [without_decisions(0), without_decisions(1)]).report
    assert report.empty and (report.kept, report.decisions, report.turns) == (2, 0, 0)
    assert check(tmp_path / "b", []).report.empty
    assert not check(tmp_path / "c", [without_decisions(0), sound(1)]).report.empty


@pytest.mark.parametrize(
    ("option", "setting"),
    [("missing_boundary", "algorithm.missing_boundary"), ("on_bad_record", "rollout.on_bad_record")],
)
def test_unknown_policy(tmp_path: Path, option: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, [sound()], **{option: "ignore"})
    assert (caught.value.found, caught.value.setting) == ("ignore", setting)


# -- the vectorised turn check against a loop


def turns_are_sound(mask: list[bool], ids: list[int]) -> bool:
    last = -1
    for sampled_here, turn in zip(mask, ids, strict=True):
        if not sampled_here:
            if turn != -1:
                return False
            continue
        if turn not in ((0,) if last < 0 else (last, last + 1)):
            return False
        last = turn
    return True


@st.composite
def masks_and_turns(draw: st.DrawFn) -> tuple[list[bool], list[int]]:
    """Mostly sound turn ids, so that both verdicts are common."""
    mask = [False, *draw(st.lists(st.booleans(), max_size=6))]
    ids, turn = [], 0
    for position, here in enumerate(mask):
        if here and any(mask[:position]):
            turn += draw(st.integers(0, 1))
        ids.append(turn if here else -1)
    if draw(st.booleans()):
        ids[draw(st.integers(0, len(ids) - 1))] = draw(st.integers(-2, 3))
    return mask, ids


@settings(max_examples=60, deadline=None)
@given(st.lists(masks_and_turns(), min_size=1, max_size=4))
def test_turn_check_equals_a_loop(rows: list[tuple[list[bool], list[int]]]) -> None:
    from megatron_rl.rollouts._checks import check_turns
    from megatron_rl.rollouts._decode import decode
    from megatron_rl.rollouts._encode import encode
    from megatron_rl.rollouts.validate import Examination

    trajectories = []
    for number, (mask, ids) in enumerate(rows):
        zeros = np.zeros(len(mask), np.int32)
        turns = len({turn for here, turn in zip(mask, ids, strict=True) if here})
        trajectories.append(
            sound(
                number,
                tokens=zeros,
                action_mask=np.array(mask),
                turn_id=np.array(ids, np.int16),
                logprobs=zeros.astype(np.float32),
                version=zeros,
                turn_rewards=np.zeros(turns, np.float32),
                routes=None,
            )
        )
    (records,) = encode(HEADER, trajectories, "memory").to_batches()
    exam = Examination(decode(records, HEADER, "memory", 0, None), limits=None)
    check_turns(exam)
    assert [row for row, _ in exam.faults] == [
        n for n, (mask, ids) in enumerate(rows) if not turns_are_sound(mask, ids)
    ]
