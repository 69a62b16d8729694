from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from megatron_rl.errors import CheckpointError
from megatron_rl.files import sweep
from megatron_rl.hf.audit import Audit, audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.importer import ParamRef, load_shard, needs_initialisation
from megatron_rl.hf.inventory import expected_names
from megatron_rl.hf.reader import INDEX_FILE, SafetensorsReader
from megatron_rl.hf.writer import StreamingWriter
from tests.unit.hf.checkpoints import VARIANTS, Layout, edit_config, edit_tensors, make_model, round_trip, tensors_of

ROUTER = "model.layers.1.mlp.gate.weight"


def _write(target: Path, source: Path, tensors: dict[str, torch.Tensor], **options) -> None:
    with StreamingWriter(target, read_hf_config(source), source, **options) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


def _audit(path: Path, **options):
    return audit_checkpoint(SafetensorsReader(path), read_hf_config(path), **options)


def _nothing_left_beside(target: Path) -> bool:
    return not any(".partial" in file.name for file in target.parent.iterdir())


@pytest.mark.parametrize("max_shard_bytes", [1, 50_000, 2**30])
def test_shards_hold_every_tensor_once_within_the_limit(checkpoint, tmp_path, max_shard_bytes):
    source, target = checkpoint("plain"), tmp_path / "out"
    stored = tensors_of(source)
    _write(target, source, stored, max_shard_bytes=max_shard_bytes)
    written = tensors_of(target)
    assert written.keys() == stored.keys() and all(torch.equal(stored[n], written[n]) for n in stored)
    for file in target.glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(value.numel() * 4 for value in held.values()) <= max_shard_bytes
    assert (target / INDEX_FILE).exists() == (max_shard_bytes < 2**30)
    assert _audit(target).problems == ()
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
        file.name for file in target.iterdir()
    }
    assert read_hf_config(target) == read_hf_config(source) and _nothing_left_beside(target)


def test_the_written_dtype_is_recorded(checkpoint, tmp_path):
    source = checkpoint("plain")
    _write(tmp_path / "out", source, {name: value.bfloat16() for name, value in tensors_of(source).items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_written_tensor_may_be_overwritten_at_once(checkpoint, tmp_path):
    source = checkpoint("plain")
    stored, scratch = tensors_of(source), torch.empty(100_000)
    with StreamingWriter(tmp_path / "out", read_hf_config(source), source) as writer:
        for name, value in stored.items():
            reused = scratch[: value.numel()].view(value.shape).copy_(value)
            writer.write(name, reused)
    written = tensors_of(tmp_path / "out")
    assert all(torch.equal(stored[name], written[name]) for name in stored)


SABOTAGE = {
    "missing": lambda t: t.pop("model.layers.2.mlp.experts.4.up_proj.weight"),
    "unexpected": lambda t: t.update({"model.layers.9.mlp.gate.weight": torch.ones(2)}),
    "shape": lambda t: t.update({ROUTER: t[ROUTER].T.contiguous()}),
    "non_finite": lambda t: t[ROUTER].__setitem__((3, 17), math.nan),
    "constant": lambda t: t[ROUTER].fill_(0.25),
}


@pytest.mark.parametrize("kind", SABOTAGE)
def test_sabotage_is_found_on_disk_and_stops_an_export(copy, tmp_path, kind):
    edit_tensors(copy, SABOTAGE[kind])
    report = _audit(copy)
    # A tensor of an expert that is gone also leaves its layer short of an expert.
    assert [problem.kind for problem in report.problems] == [kind] + ["experts"] * (kind == "missing")
    named = report.problems[0].tensor
    with pytest.raises(CheckpointError, match=rf"1 {kind}.*{named}"):
        report.raise_for_problems(copy)
    with pytest.raises(CheckpointError, match=f"{kind} tensor") as caught:
        _write(tmp_path / "out", copy, tensors_of(copy))
    assert caught.value.field == named
    assert not (tmp_path / "out").exists() and _nothing_left_beside(tmp_path / "out")


def test_headers_alone_show_names_and_shapes(copy):
    for kind in ("shape", "unexpected"):
        edit_tensors(copy, SABOTAGE[kind])
    assert sorted(problem.kind for problem in _audit(copy, values=False).problems) == ["shape", "unexpected"]


def test_constant_norms_are_no_fault(copy):
    edit_tensors(copy, lambda tensors: tensors["model.norm.weight"].fill_(1.0))
    assert _audit(copy).problems == ()


def test_duplicates_are_found(copy, tmp_path):
    stored = load_file(copy / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match="duplicate tensor"),
        StreamingWriter(tmp_path / "out", read_hf_config(copy), copy) as writer,
    ):
        writer.write(ROUTER, stored[ROUTER])
        writer.write(ROUTER, stored[ROUTER])
    save_file(stored, copy / "a.safetensors")
    save_file({ROUTER: stored[ROUTER], "lm_head.weight": stored.pop("lm_head.weight")}, copy / "b.safetensors")
    (copy / "model.safetensors").unlink()
    weight_map = dict.fromkeys(stored, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (copy / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert _audit(copy).of("duplicate") == ["lm_head.weight", ROUTER] and len(_audit(copy).problems) == 2


def test_stacked_experts_are_accounted_for(tmp_path):
    make_model().save_pretrained(tmp_path, save_original_format=False)
    assert _audit(tmp_path).problems == ()
    edit_tensors(tmp_path, lambda t: t["model.layers.0.mlp.experts.down_proj"][4].fill_(math.nan))
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.gate_up_proj"))
    report = _audit(tmp_path)
    assert report.of("non_finite") == ["model.layers.0.mlp.experts.4.down_proj.weight"]
    assert len(report.of("missing")) == len(report.problems) - 2 == 2 * 6
    assert report.of("experts") == ["model.layers.1"]


def test_a_tied_output_layer_is_accepted_only_when_equal(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint("sparse_step"), tmp_path / "copy")
    assert "lm_head.weight" not in expected_names(read_hf_config(copy))
    edit_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert _audit(copy).problems == ()
    edit_tensors(copy, lambda t: t["lm_head.weight"].add_(1))
    assert _audit(copy).of("tied") == ["lm_head.weight"]
    audit = Audit(read_hf_config(copy))
    assert [problem.kind for problem in audit.observe("lm_head.weight", torch.randn(61, 32))] == ["tied"]


def test_an_existing_target_is_replaced_only_on_request(checkpoint, tmp_path):
    source, target = checkpoint("plain"), tmp_path / "out"
    stored = tensors_of(source)
    _write(target, source, stored)
    with pytest.raises(CheckpointError, match="overwrite"):
        _write(target, source, stored)
    changed = stored | {ROUTER: stored[ROUTER] + 1}
    _write(target, source, changed, overwrite=True)
    assert torch.equal(tensors_of(target)[ROUTER], changed[ROUTER]) and _nothing_left_beside(target)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        _write(precious, source, stored, overwrite=True)
    assert (precious / "thesis.txt").exists()


def test_a_failed_export_leaves_the_old_checkpoint(checkpoint, tmp_path):
    source, target = checkpoint("plain"), tmp_path / "out"
    stored = tensors_of(source)
    _write(target, source, stored)
    with pytest.raises(CheckpointError, match="missing"):
        _write(target, source, {ROUTER: stored[ROUTER] + 1}, overwrite=True)
    assert torch.equal(tensors_of(target)[ROUTER], stored[ROUTER]) and _nothing_left_beside(target)


class Killed(BaseException):
    """Ends a writer where no handler of errors sees it."""


@pytest.mark.parametrize("step", [1, 2])
def test_an_export_killed_between_its_renames_is_repeated(checkpoint, tmp_path, monkeypatch, step):
    source, target = checkpoint("plain"), tmp_path / "out"
    stored = tensors_of(source)
    _write(target, source, stored)
    changed = stored | {ROUTER: stored[ROUTER] + 1}
    calls = []

    def dying(old, new, real=os.rename):
        calls.extend([new] if Path(new).parent == tmp_path else [])
        if len(calls) == step:
            raise Killed
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(Killed):
            _write(target, source, changed, overwrite=True)
    assert target.exists() == (step == 1)
    # The writer of the leftover is this process, which lives: only its owner may say that it is alone.
    sweep(tmp_path, "out", alone=True)
    assert torch.equal(tensors_of(target)[ROUTER], stored[ROUTER])
    _write(target, source, changed, overwrite=True)
    assert torch.equal(tensors_of(target)[ROUTER], changed[ROUTER])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_critic_starts_from_a_policy_and_comes_back_exactly(checkpoint, tmp_path):
    """Backbone from the policy, a new head, export, values in transformers, import."""
    source = checkpoint("dense_layers")
    policy, stored = read_hf_config(source), tensors_of(source)
    critic = policy.as_critic()
    assert needs_initialisation(policy, "value_head.weight")
    tensors = {name: stored[name] for name in expected_names(critic) if name in stored}
    tensors["score.weight"] = torch.randn(1, 32)
    assert set(stored) - set(tensors) == {"lm_head.weight"}
    with StreamingWriter(tmp_path / "critic", critic, source) as writer:
        for name, value in tensors.items():
            writer.write(name, value)

    config, reader = read_hf_config(tmp_path / "critic"), SafetensorsReader(tmp_path / "critic")
    assert config == critic and not needs_initialisation(config, "value_head.weight")
    assert audit_checkpoint(reader, config).problems == ()
    back = dict(round_trip(reader, config, Layout(tp=2, ep=2)))
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)

    model, loading = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24)[None]
    backbone = make_model(**VARIANTS["dense_layers"]).model
    torch.testing.assert_close(
        model.eval()(tokens).logits, backbone(tokens).last_hidden_state @ tensors["score.weight"].T
    )


def test_a_critic_checkpoint_without_its_head_is_refused(copy):
    edit_config(copy, architectures=["Qwen3MoeForTokenClassification"])
    config, reader = read_hf_config(copy), SafetensorsReader(copy)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_shard(reader, config, ParamRef("value_head.weight", None, None, 0, 1, (1, 32)))
    assert {problem.kind: problem.tensor for problem in _audit(copy).problems} == {
        "missing": "score.weight",
        "unexpected": "lm_head.weight",
    }
