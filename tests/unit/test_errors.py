"""Errors say what, where, found, expected and which setting; and they survive the way from a rank to its parent."""

from __future__ import annotations

import pickle

import pytest

from megatron_rl import errors

NAMES = ("ConfigError", "RolloutError", "RouteError", "CheckpointError", "LaunchError", "EngineError",
         "EngineUnavailableError", "EngineAnswerError", "EngineVersionError")  # fmt: skip
ALL = [getattr(errors, name) for name in NAMES]
PARTS = {"file": "a.arrow", "row": 0, "field": "tokens", "found": 0, "expected": "[0, 7)", "setting": "data.on_bad"}


def test_message_holds_every_part_in_order() -> None:
    assert str(errors.RolloutError("bad token", **PARTS)) == (
        "bad token [file=a.arrow, row=0, field=tokens]: found 0, expected [0, 7). Change: data.on_bad"
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("file", "x [row=0, field=tokens]: found 0, expected [0, 7). Change: data.on_bad"),
        ("row", "x [file=a.arrow, field=tokens]: found 0, expected [0, 7). Change: data.on_bad"),
        ("field", "x [file=a.arrow, row=0]: found 0, expected [0, 7). Change: data.on_bad"),
        ("found", "x [file=a.arrow, row=0, field=tokens]: expected [0, 7). Change: data.on_bad"),
        ("expected", "x [file=a.arrow, row=0, field=tokens]: found 0. Change: data.on_bad"),
        ("setting", "x [file=a.arrow, row=0, field=tokens]: found 0, expected [0, 7)"),
    ],
)
def test_missing_part_leaves_no_trace(missing: str, message: str) -> None:
    error = errors.ConfigError("x", **{name: value for name, value in PARTS.items() if name != missing})
    assert str(error) == message and getattr(error, missing) is None


def test_only_what_is_known_is_said() -> None:
    assert str(errors.ConfigError("no such model")) == "no such model"


@pytest.mark.parametrize("kind", ALL)
def test_pickling_keeps_kind_parts_and_message(kind: type[errors.MegatronRLError]) -> None:
    error = kind("what", **PARTS)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error)
    assert {key: getattr(copy, key) for key in PARTS} == PARTS


def test_one_except_clause_catches_all_and_routes_are_rollouts() -> None:
    assert all(issubclass(kind, errors.MegatronRLError) for kind in ALL)
    assert issubclass(errors.RouteError, errors.RolloutError)
    assert not issubclass(errors.MegatronRLError, (ValueError, RuntimeError))
