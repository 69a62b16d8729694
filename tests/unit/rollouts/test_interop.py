"""Dumps of other stacks: what each of their fields becomes, faults by line, and exact round trips through files."""

from __future__ import annotations

import base64
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from megatron_rl.cli.app import app
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.vocabulary import Vocabulary
from megatron_rl.errors import ConfigError, RolloutError, RouteError
from megatron_rl.files import temporary_name
from megatron_rl.rollouts import OUTCOMES, read_batch, trajectory_at, validate, write_shard
from megatron_rl.rollouts.interop.dumps import ImportOptions, export_dump, import_dumps, read_dump
from tests.unit.rollouts.records import HEADER, MODEL, assert_same, routes_for, sound, without_decisions

LAYERS = 5  # decoder layers, of which 1, 2 and 3 have experts
OPTIONS = ImportOptions(HEADER, num_layers=LAYERS)
TOKENS = [3, 4, 5, 6, 7, 8, 9, 10, 11]
MASK = [1, 1, 0, 1, 0, 0, 1]  # after a prompt of two


def every_layer(seed: int = 0, rows: int = len(TOKENS) - 1) -> np.ndarray:
    """Routes as SGLang and older vLLM report them: int32 [rows, all decoder layers, k], zeros in dense layers."""
    routes = np.zeros((rows, LAYERS, MODEL.topk), np.int32)
    routes[:, list(MODEL.moe_layers)] = routes_for(rows + 1, seed=seed).transpose(1, 0, 2)
    return routes


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return b64(stream.getvalue())


def sample(**changes: Any) -> dict[str, Any]:
    """What `Sample.to_dict()` of slime looks like, once arrays are base64."""
    logprobs = [-0.5, -0.25, 0.0, -1.0, 0.0, 0.0, -2.0]
    return {
        "group_index": 4, "index": 17, "prompt": "p", "tokens": TOKENS, "multimodal_inputs": None, "response": "r",
        "response_length": 7, "label": None, "reward": 1.5, "loss_mask": MASK, "weight_versions": ["2", "3", "3"],
        "rollout_log_probs": logprobs, "rollout_routed_experts": b64(every_layer().tobytes()), "remove_sample": False,
        "teacher_log_probs": None, "status": "completed", "metadata": {"source": "x"}, "spec_info": {},
    } | changes  # fmt: skip


def response(**changes: Any) -> dict[str, Any]:
    """A vLLM completion with `return_token_ids`."""
    choice = {
        "index": 0, "text": "…", "finish_reason": "stop", "stop_reason": None, "token_ids": [9, 10],
        "prompt_token_ids": [3, 4, 5], "logprobs": {"token_logprobs": [-0.5, -1.5], "tokens": ["a", "b"]},
        "routed_experts": npy(every_layer(rows=4).astype(np.uint8)),
    } | changes.pop("choice", {})  # fmt: skip
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [choice],
        "reward": 0.5,
        "weight_version": 6,
    } | changes


def dumped(tmp_path: Path, *lines: Any, name: str = "dump.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def read_one(tmp_path: Path, line: Any, options: ImportOptions = OPTIONS):
    (trajectory,) = read_dump(dumped(tmp_path, line), options)
    return trajectory


def test_slime_sample_field_by_field(tmp_path: Path) -> None:
    found = read_one(tmp_path, sample())
    assert found.tokens.tolist() == TOKENS
    assert found.action_mask.tolist() == [False, False, *map(bool, MASK)]
    assert found.turn_id.tolist() == [-1, -1, 0, 0, -1, 1, -1, -1, 2]
    assert found.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1, 0, 0, -2]
    assert found.version[found.action_mask].tolist() == [2, 2, 3, 3]
    assert found.turn_rewards.tolist() == [0, 0, 0]
    assert (found.reward, found.outcome, found.terminated, found.truncated) == (1.5, "completed", True, False)
    assert (found.trajectory_id, found.prompt_id, found.group_id) == ("dump:17", "4", "4")
    assert found.metadata == {"source": "x", "status": "completed", "remove_sample": False}
    np.testing.assert_array_equal(found.routes, routes_for(len(TOKENS)))


@pytest.mark.parametrize(
    "routes",
    [
        npy(every_layer()),
        npy(every_layer().astype(np.uint8)),
        npy(every_layer()[:, [1, 2, 3]].astype(np.int16)),
        b64(every_layer()[:, [1, 2, 3]].tobytes()),
        every_layer().tolist(),
        {"data": b64(every_layer().astype(np.int16).tobytes()), "dtype": "int16", "shape": [8, LAYERS, 2]},
    ],
    ids=["npy int32", "npy uint8", "MoE layers only", "raw MoE layers only", "lists", "described"],
)
def test_routes_in_every_form_peers_write_them(routes: Any, tmp_path: Path) -> None:
    found = read_one(tmp_path, sample(rollout_routed_experts=routes))
    assert found.routes.dtype == np.uint8
    np.testing.assert_array_equal(found.routes, routes_for(len(TOKENS)))


def test_rows_that_were_never_fed_are_missing_and_absent_routes_are_null(tmp_path: Path) -> None:
    found = read_one(tmp_path, sample(rollout_routed_experts=npy(every_layer()[:6])))
    assert (found.routes[:, 6:] == 255).all() and (found.routes[:, :6] != 255).all()
    assert read_one(tmp_path, sample(rollout_routed_experts=None)).routes is None


@pytest.mark.parametrize(
    ("status", "removed", "outcome", "ending"),
    [
        ("completed", False, "completed", (True, False, None)),
        ("truncated", False, "truncated_length", (False, True, [])),
        ("aborted", False, "aborted", (False, False, None)),
        ("failed", False, "environment_error", (False, False, None)),
        ("completed", True, "aborted", (False, False, None)),
    ],
)
def test_status_becomes_outcome(status: str, removed: bool, outcome: str, ending: tuple, tmp_path: Path) -> None:
    found = read_one(tmp_path, sample(status=status, remove_sample=removed))
    boundary = None if found.boundary_tokens is None else found.boundary_tokens.tolist()
    assert (found.outcome, (found.terminated, found.truncated, boundary)) == (outcome, ending)
    assert found.metadata["status"] == status


def test_what_a_sample_may_leave_out(tmp_path: Path) -> None:
    line = sample(loss_mask=None, index=None, group_index=None, weight_versions=["5"], metadata=None)
    found = read_one(tmp_path, line)
    assert found.turn_id.tolist() == [-1, -1, *[0] * 7]
    assert set(found.version[2:].tolist()) == {5}
    assert found.trajectory_id == found.prompt_id == found.group_id == "dump:1"


def test_options_fill_in_what_the_dump_lacks(tmp_path: Path) -> None:
    options = replace(OPTIONS, version=9, reward_key="math", missing_reward=-1.0)
    assert set(read_one(tmp_path, sample(weight_versions=[]), options).version[2:].tolist()) == {0, 9}
    assert read_one(tmp_path, sample(reward={"math": 0.5, "style": 2}), options).reward == 0.5
    assert read_one(tmp_path, sample(reward=None), options).reward == -1.0


FAULTS = [
    ({"tokens": None}, "tokens", "null"),
    ({"tokens": [1, 2.5, *TOKENS[2:]]}, "tokens", "2.5 at 1"),
    ({"tokens": [1, "2", *TOKENS[2:]]}, "tokens", "'2' at 1"),
    ({"tokens": [2**31, *TOKENS[1:]]}, "tokens", "2147483648"),
    ({"response_length": 9}, "response_length", "9"),
    ({"response_length": "7"}, "response_length", "7"),
    ({"response_length": True}, "response_length", "True"),
    ({"loss_mask": MASK[1:]}, "loss_mask", "found 6, expected 7"),
    ({"loss_mask": [2, *MASK[1:]]}, "loss_mask", "2"),
    ({"rollout_log_probs": None}, "rollout_log_probs", "null"),
    ({"rollout_log_probs": [0.0] * 9}, "rollout_log_probs", "found 9, expected 7"),
    ({"weight_versions": []}, "weight_versions", "--version"),
    ({"weight_versions": ["1", "2"]}, "weight_versions", "3 turns"),
    ({"weight_versions": ["default"]}, "weight_versions", "default"),
    ({"weight_versions": [2**40]}, "weight_versions", "2\\^31"),
    ({"reward": None}, "reward", "--missing-reward"),
    ({"reward": {"a": 1, "b": 2}}, "reward", "--reward-key"),
    ({"reward": "high"}, "reward", "high"),
    ({"status": "pending"}, "status", "pending"),
    ({"metadata": [1]}, "metadata", "\\[1\\]"),
    ({"rollout_routed_experts": "%%%"}, "rollout_routed_experts", "base64"),
    ({"rollout_routed_experts": npy(every_layer())[:-40]}, "rollout_routed_experts", "npy"),
    ({"rollout_routed_experts": b64(every_layer().tobytes()[4:])}, "rollout_routed_experts", "316 bytes"),
    ({"rollout_routed_experts": npy(every_layer()[:, :4])}, "rollout_routed_experts", "layer count"),
    ({"rollout_routed_experts": npy(every_layer(rows=9))}, "rollout_routed_experts", "more route rows"),
    ({"rollout_routed_experts": npy(every_layer() + 7)}, "rollout_routed_experts", "out of range"),
    ({"rollout_routed_experts": npy(every_layer()[..., :1])}, "rollout_routed_experts", "do not fit the model"),
    ({"rollout_routed_experts": npy(every_layer() * 1.0)}, "rollout_routed_experts", "float64"),
    ({"rollout_routed_experts": [[1], [1, 2]]}, "rollout_routed_experts", "ragged"),
    ({"rollout_routed_experts": {"data": "AAAA", "dtype": "int16", "shape": [9]}}, "shape", "3 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "said"), FAULTS, ids=[f"{f}-{i}" for i, (_, f, _) in enumerate(FAULTS)])
def test_fault_is_named_with_line_and_field(change: dict, field: str, said: str, tmp_path: Path) -> None:
    path = dumped(tmp_path, sample(), "", sample(**change), sample())
    with pytest.raises(RolloutError, match=said) as caught:
        list(read_dump(path, OPTIONS))
    assert caught.value.file == f"{path}:3"
    assert caught.value.field.endswith(field)
    refused: list[RolloutError] = []
    assert len(list(read_dump(path, OPTIONS, refused=refused))) == 2
    assert [str(error) for error in refused] == [str(caught.value)]
    assert isinstance(refused[0], RouteError) == ("routed" in refused[0].field)


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"samples": [4]}', '{"text": "hello"}'])
def test_line_that_is_no_record(text: str, tmp_path: Path) -> None:
    path = dumped(tmp_path, sample(), text)
    with pytest.raises(RolloutError) as caught:
        list(read_dump(path, OPTIONS))
    assert caught.value.file == f"{path}:2"


def test_vllm_completion_field_by_field(tmp_path: Path) -> None:
    found = read_one(tmp_path, response())
    assert found.tokens.tolist() == [3, 4, 5, 9, 10]
    assert found.turn_id.tolist() == [-1, -1, -1, 0, 0]
    assert found.logprobs.tolist() == [0, 0, 0, -0.5, -1.5]
    assert found.version.tolist() == [0, 0, 0, 6, 6]
    assert (found.reward, found.outcome, found.terminated) == (0.5, "completed", True)
    assert (found.trajectory_id, found.prompt_id, found.group_id) == ("cmpl-1-0", "cmpl-1", "cmpl-1")
    np.testing.assert_array_equal(found.routes, routes_for(5))


def test_vllm_routes_of_prompt_and_response_apart(tmp_path: Path) -> None:
    whole = every_layer(rows=4)[:, [1, 2, 3]].astype(np.int16)
    line = response(choice={"routed_experts": npy(whole[3:])}, prompt_routed_experts=npy(whole[:3]))
    np.testing.assert_array_equal(read_one(tmp_path, line).routes, routes_for(5))
    line["prompt_routed_experts"] = npy(whole[:2])
    with pytest.raises(RolloutError, match="prompt_routed_experts"):
        read_one(tmp_path, line)


def test_vllm_chat_and_generate_responses(tmp_path: Path) -> None:
    """They list log-probs an object a token; chat has the prompt beside the choices, generate has none."""
    content = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    choice = {"prompt_token_ids": None, "logprobs": content}
    chat = response(choice=choice, prompt_token_ids=[3, 4, 5])
    assert_same(read_one(tmp_path, chat), read_one(tmp_path, response()))
    generated = response(choice=choice, id=None, request_id="cmpl-1")
    with pytest.raises(RolloutError, match=r"choices\[0\].prompt_token_ids"):
        read_one(tmp_path, generated)
    assert_same(read_one(tmp_path, generated | {"prompt_token_ids": [3, 4, 5]}), read_one(tmp_path, response()))


def test_vllm_choices_are_a_group_and_may_have_rewards_of_their_own(tmp_path: Path) -> None:
    line = response(id="cmpl-7")
    line["choices"] = [line["choices"][0] | {"reward": float(i), "finish_reason": kind} for i, kind in
                       enumerate(("stop", "length", "abort"))]  # fmt: skip
    found = list(read_dump(dumped(tmp_path, line), OPTIONS, "vllm"))
    assert [t.trajectory_id for t in found] == ["cmpl-7-0", "cmpl-7-1", "cmpl-7-2"]
    assert {t.group_id for t in found} == {"cmpl-7"}
    assert [t.reward for t in found] == [0, 1, 2]
    assert [t.outcome for t in found] == ["completed", "truncated_length", "aborted"]
    assert [t.boundary_tokens is None for t in found] == [True, False, True]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"choices": []}, "choices"),
        ({"choices": [3]}, "choices[0]"),
        ({"weight_version": None}, "choices[0].weight_version"),
        ({"reward": None}, "choices[0].reward"),
        ({"choice": {"token_ids": None}}, "choices[0].token_ids"),
        ({"choice": {"token_ids": [], "logprobs": {"token_logprobs": []}}}, "choices[0].token_ids"),
        ({"choice": {"finish_reason": "tool_calls"}}, "choices[0].finish_reason"),
        ({"choice": {"logprobs": None}}, "choices[0].logprobs"),
        ({"choice": {"logprobs": {"token_logprobs": [-1.0]}}}, "choices[0].logprobs.token_logprobs"),
        ({"choice": {"logprobs": {"token_logprobs": [None, -1.0]}}}, "choices[0].logprobs.token_logprobs"),
        ({"choice": {"logprobs": {"content": [{"token": "a"}]}}}, "choices[0].logprobs.content"),
        ({"choice": {"routed_experts": npy(every_layer(rows=5))}}, "choices[0].routed_experts"),
    ],
)
def test_vllm_faults_are_named(change: dict, field: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutError) as caught:
        read_one(tmp_path, response(**change))
    assert caught.value.field == field
    assert caught.value.file.endswith("dump.jsonl:1")


class Unknown:
    """A class that nobody has declared harmless."""


def test_slime_debug_dump_is_read_and_nothing_else_is_unpickled(tmp_path: Path) -> None:
    arrays = sample(tokens=np.asarray(TOKENS), rollout_routed_experts=every_layer(), index=None, group_index=None)
    torch.save({"rollout_id": 3, "samples": [arrays, sample()]}, tmp_path / "rollout_3.pt")
    first, second = read_dump(tmp_path / "rollout_3.pt", OPTIONS)
    assert first.trajectory_id == "rollout_3:1:samples[0]"
    assert second.trajectory_id == "rollout_3:17"
    np.testing.assert_array_equal(first.routes, second.routes)
    (listed,) = read_dump(dumped(tmp_path, {"rollout_id": 3, "samples": [sample()]}, name="rollout_3.jsonl"), OPTIONS)
    assert_same(listed, second)
    torch.save({"samples": [Unknown()]}, tmp_path / "evil.pt")
    with pytest.raises(RolloutError, match="dump is unreadable .*evil.pt"):
        list(read_dump(tmp_path / "evil.pt", OPTIONS))


def test_import_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    good = dumped(tmp_path, sample(), sample(index=18), name="a.jsonl")
    bad = dumped(tmp_path, sample(), sample(status="pending"), name="b.jsonl")
    out = tmp_path / "deep" / "out"
    with pytest.raises(RolloutError, match="b.jsonl:2"):
        import_dumps([good, bad], out, OPTIONS)
    refused: list[RolloutError] = []
    assert import_dumps([good, bad], out, OPTIONS, refused=refused, partial=False) == []
    assert len(refused) == 1
    assert list(out.parent.iterdir()) == []
    shards = import_dumps([good, bad], out, OPTIONS, refused=[])
    assert [(shard.file, shard.rows) for shard in shards] == [("a-00000.arrow", 2), ("b-00000.arrow", 1)]
    assert len(read_batch(out)) == 3
    with pytest.raises(RolloutError, match="--out"):
        import_dumps([good], out, OPTIONS)


def test_what_a_killed_import_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    out, living = tmp_path / "out", temporary_name(tmp_path / "out")
    living.mkdir()
    child = os.fork()
    if not child:
        temporary_name(out).mkdir()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    import_dumps([dumped(tmp_path, sample(), name="a.jsonl")], out, OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, "a.jsonl", "out"])


def test_imports_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twice = [dumped(tmp_path, sample()), dumped(tmp_path / "other", sample())]
    with pytest.raises(RolloutError, match="one name"):
        import_dumps(twice, tmp_path / "out", OPTIONS)
    with pytest.raises(RolloutError, match="nothing to import"):
        import_dumps([dumped(tmp_path, "")], tmp_path / "out", OPTIONS)
    with pytest.raises(RolloutError, match="unreadable"):
        import_dumps([tmp_path / "absent.jsonl"], tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_large_dumps_become_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dumped(tmp_path, *[sample(index=i) for i in range(7)])
    monkeypatch.setattr("megatron_rl.rollouts.interop.dumps.SHARD_ROWS", 3)
    shards = import_dumps([path], tmp_path / "rows", OPTIONS)
    assert [shard.rows for shard in shards] == [3, 3, 1]
    record = sum(getattr(value, "nbytes", 0) for value in vars(next(read_dump(path, OPTIONS))).values())
    monkeypatch.setattr("megatron_rl.rollouts.interop.dumps.SHARD_BYTES", record + 1)
    shards = import_dumps([path], tmp_path / "bytes", OPTIONS)
    assert [shard.rows for shard in shards] == [2, 2, 2, 1]
    assert read_batch(tmp_path / "rows").trajectory_ids == read_batch(tmp_path / "bytes").trajectory_ids


@pytest.mark.parametrize("lines", [[sample(), sample(status="truncated")], [response()]], ids=["slime", "vllm"])
def test_imported_rollouts_pass_the_entrance_to_training(lines: list, tmp_path: Path) -> None:
    import_dumps([dumped(tmp_path, *lines)], tmp_path / "out", OPTIONS)
    checked = validate(read_batch(tmp_path / "out"), expected=MODEL, replay=True, current_version=6, temperature=1.0)
    assert checked.report.kept == len(lines)
    assert checked.report.route_coverage == 1.0


def test_command_names_every_fault_and_round_trips(tmp_path: Path) -> None:
    """Through the command line and a model directory: six decoder layers, the first of them dense."""
    vocabulary = Vocabulary([f"w{i}" for i in range(32)])
    shape = TinyShape(hidden_size=16, num_layers=6, num_heads=2, num_kv_heads=1, moe_hidden_size=8, dense_layers=(0,))
    write_tiny_checkpoint(tmp_path / "model", vocabulary, shape)
    routes = np.arange(8 * 6 * 2).reshape(8, 6, 2) % 8
    good = sample(rollout_routed_experts=npy(routes))
    path = dumped(tmp_path, good, sample(status="pending"), "{", good | {"index": 18})

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    command = ("import", path, "--model", tmp_path / "model", "--out", tmp_path / "out")
    failed = run(*command)
    assert failed.exit_code == 1
    assert "dump.jsonl:2" in failed.output and "dump.jsonl:3" in failed.output
    assert "2 bad records" in failed.output and not (tmp_path / "out").exists()
    assert run(*command, "--skip-bad").exit_code == 0
    batch = read_batch(tmp_path / "out")
    assert batch.header.fingerprint.moe_layers == (1, 2, 3, 4, 5)
    assert batch.header.fingerprint.tokenizer_hash == vocabulary.fingerprint
    np.testing.assert_array_equal(batch.routes[0], routes[:, 1:].transpose(1, 0, 2))
    assert run("export", tmp_path / "out", tmp_path / "again.jsonl").exit_code == 0
    again = ("import", tmp_path / "again.jsonl", "--model", tmp_path / "model", "--out", tmp_path / "second")
    assert run(*again).exit_code == 0
    for row in range(2):
        assert_same(trajectory_at(read_batch(tmp_path / "second"), row), trajectory_at(batch, row))
    (tmp_path / "model" / "vocabulary.json").unlink()
    for option in (("--format", "verl"), ("--logprobs", "some"), ()):
        assert isinstance(run(*again, *option).exception, ConfigError)


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def records(draw: st.DrawFn, number: int):
    """Any record that keeps the schema's invariants."""
    runs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=0, max_size=4))
    turn_id = [-1] * draw(st.integers(1, 3))
    for turn, (seen, sampled) in enumerate(runs):
        turn_id += [-1] * seen + [turn] * sampled
    turn_id += [-1] * draw(st.integers(0, 2))
    turns = np.asarray(turn_id, np.int16)
    mask, n = turns >= 0, len(turn_id)
    drawn = np.asarray(draw(st.lists(NUMBERS, min_size=n, max_size=n)), np.float32)
    versions = np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32)
    text = st.text(max_size=4)
    boundary = draw(st.sampled_from([None, [], [7, 0]]))
    vector = draw(st.none() | st.lists(NUMBERS, max_size=3))
    return sound(
        number,
        trajectory_id=draw(text),
        prompt_id=draw(text),
        group_id=draw(text),
        tokens=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        turn_id=turns,
        action_mask=mask,
        logprobs=np.where(mask, drawn, 0).astype(np.float32),
        version=versions,
        turn_rewards=np.asarray(draw(st.lists(NUMBERS, min_size=len(runs), max_size=len(runs))), np.float32),
        reward=draw(NUMBERS),
        outcome=draw(st.sampled_from(OUTCOMES)),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        boundary_tokens=None if boundary is None else np.asarray(boundary, np.int32),
        reward_vector=None if vector is None else np.asarray(vector, np.float32),
        routes=routes_for(n, seed=number) if draw(st.booleans()) else None,
        metadata=draw(st.dictionaries(text, st.none() | st.integers() | text | st.lists(st.booleans()), max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_export_then_import_gives_back_every_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    written = [data.draw(records(number)) for number in range(data.draw(st.integers(1, 4)))]
    directory = tmp_path_factory.mktemp("trip")
    write_shard(directory / "first", HEADER, written)
    assert export_dump(directory / "first", directory / "dump.jsonl") == len(written)
    import_dumps([directory / "dump.jsonl"], directory / "second", OPTIONS)
    batch = read_batch(directory / "second")
    for row, trajectory in enumerate(written):
        assert_same(trajectory_at(batch, row), trajectory)


def test_missing_rows_survive_the_round_trip(tmp_path: Path) -> None:
    routes = routes_for(7)
    routes[:, 5] = 255
    nothing_sampled = replace(without_decisions(1), logprobs=np.zeros(7, np.float32))
    write_shard(tmp_path / "first", HEADER, [sound(routes=routes), nothing_sampled])
    export_dump(tmp_path / "first", tmp_path / "dump.jsonl")
    found, idle = read_dump(tmp_path / "dump.jsonl", OPTIONS)
    assert_same(found, sound(routes=routes))
    assert_same(idle, nothing_sampled)


def test_exported_samples_read_as_foreign_ones_mean_the_same(tmp_path: Path) -> None:
    """A peer drops our key: tokens, mask, log-probs, routes and the total reward are still there."""
    write_shard(tmp_path / "first", HEADER, [sound(), sound(1, outcome="aborted", terminated=False)])
    export_dump(tmp_path / "first", tmp_path / "ours.jsonl")
    lines = [json.loads(text) for text in (tmp_path / "ours.jsonl").read_text().splitlines()]
    for line in lines:
        del line["megatron_rl"]
    found, aborted = read_dump(dumped(tmp_path, *lines), OPTIONS)
    expected = sound()
    for name in ("tokens", "action_mask", "turn_id", "logprobs", "version", "routes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.reward == expected.reward + expected.turn_rewards.sum()
    assert (found.outcome, aborted.outcome) == ("completed", "aborted")
    assert [line["group_index"] for line in lines] == [0, 0]


def test_numbers_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "first", HEADER, [sound(), sound(1, reward=float("inf"))])
    with pytest.raises(RolloutError, match="row=1") as caught:
        export_dump(tmp_path / "first", tmp_path / "dump.jsonl")
    assert "finite" in str(caught.value)
    assert not (tmp_path / "dump.jsonl").exists()
