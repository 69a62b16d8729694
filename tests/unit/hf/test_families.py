"""Every family's table and settings, without Megatron: names and shapes are those transformers writes, shards of every
tensor go there and back bit for bit, and what cannot be expressed is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import HFModelConfig, read_hf_config
from megatron_rl.hf.exporter import ExpertStacks, join_shards
from megatron_rl.hf.families import FAMILIES as KNOWN
from megatron_rl.hf.families import REFUSED
from megatron_rl.hf.importer import ParamRef, load_shard
from megatron_rl.hf.inventory import expected_names, hf_tensors, is_stored, model_parameters
from megatron_rl.hf.names import parse_parameter_name
from megatron_rl.hf.reader import SafetensorsReader
from megatron_rl.hf.table import ParamRule
from megatron_rl.hf.writer import StreamingWriter
from tests.hf.models import FAMILIES, LAYERS, write_model
from tests.unit.hf.checkpoints import edit_config, edit_tensors, tensors_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint, made on first use; never to be changed."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_model(tmp_path_factory.mktemp("family") / family, family)
        return made[family]

    return get


@pytest.fixture
def copy(model, tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: shutil.copytree(model(family), tmp_path / "copy")


def local_shape(config: HFModelConfig, rule: ParamRule, layer: int | None, expert: int | None, tp: int):
    """Shape of one rank's shard, from the whole sources'."""
    shapes = [tensor.shape for tensor in hf_tensors(config, rule, layer, expert)]
    rows, rest = sum(shape[0] for shape in shapes), list(shapes[0][1:])
    if rule.split == "columns":
        rest[0] //= tp
    elif rule.split == "vocab":
        rows = -(-rows // tp)
    elif rule.split != "replicated":
        rows //= tp
    return (rows, *rest)


def there_and_back(path: Path, tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    config, reader = read_hf_config(path), SafetensorsReader(path)
    stacks = ExpertStacks(config)
    for rule, layer, expert in model_parameters(config):
        if is_stored(config, rule):
            shape = local_shape(config, rule, layer, expert, tp)
            ranks = [ParamRef(rule.canonical, layer, expert, rank, tp, shape) for rank in range(tp)]
            full = join_shards(rule.canonical, [load_shard(reader, config, ref) for ref in ranks], config)
            yield from stacks.split(rule.canonical, full, layer=layer, expert=expert)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_what_transformers_writes(model, family: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(model(family)).items()}
    assert expected_names(read_hf_config(model(family))) == shapes
    report = audit_checkpoint(SafetensorsReader(model(family)), read_hf_config(model(family)))
    assert (report.problems, report.notes) == ((), ())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_exact(model, family: str, tp: int) -> None:
    stored, back = tensors_of(model(family)), list(there_and_back(model(family), tp))
    assert len(back) == len(stored) and dict(back).keys() == stored.keys()
    assert [name for name, tensor in back if not torch.equal(stored[name], tensor)] == []


def test_every_family_is_tried() -> None:
    assert KNOWN.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_dimensions_are_told_apart(model, family: str) -> None:
    """No matrix is square and no two sources of one parameter could be exchanged unseen by their contents."""
    config = read_hf_config(model(family))
    square = {
        tensor.name
        for rule, layer, expert in model_parameters(config)
        for tensor in hf_tensors(config, rule, layer, expert)
        if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1]
    }
    # OLMoE's norms tie the query's width to the hidden state's.
    expected = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(LAYERS) for x in "qo"}
    assert square == (expected if family == "olmoe" else set())
    values = list(tensors_of(model(family)).values())
    assert not any(float(tensor.std()) == 0 for tensor in values)


def test_gpt_oss_gate_and_up_alternate(model) -> None:
    """Against indices written out: stored [E, hidden, 2f], gate in even columns, up in odd ones."""
    path = model("gpt_oss")
    stored = tensors_of(path)["model.layers.1.mlp.experts.gate_up_proj"]
    ref = ParamRef("mlp.experts.linear_fc1.weight", 1, 3, 0, 1, (48, 48))
    shard = load_shard(SafetensorsReader(path), read_hf_config(path), ref)
    assert all(torch.equal(shard[row], stored[3, :, 2 * row]) for row in range(24))
    assert all(torch.equal(shard[24 + row], stored[3, :, 2 * row + 1]) for row in range(24))


@pytest.mark.parametrize(
    ("live", "canonical", "expert"),
    [
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight", None),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight", None),
        ("self_attention.linear_q_down_proj.weight", "self_attention.linear_q_down_proj.weight", None),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight", None),
        ("mlp.experts.linear_fc1.weight7", "mlp.experts.linear_fc1.weight", 7),
        ("mlp.experts.linear_fc2.bias5", "mlp.experts.linear_fc2.bias", 5),
        ("mlp.experts.local_experts.5.linear_fc2.bias", "mlp.experts.linear_fc2.bias", 5),
        ("mlp.router.expert_bias", "mlp.router.expert_bias", None),
    ],
)
def test_both_naming_schemes_mean_the_same(live: str, canonical: str, expert: int | None) -> None:
    parsed = parse_parameter_name(f"module.decoder.layers.2.{live}")
    assert (parsed.canonical, parsed.layer, parsed.expert) == (canonical, 2, expert)
    assert any(rule.canonical == canonical for family in KNOWN.values() for rule in family.table)


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"topk_group": 1}, "n_group"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, "rope_parameters"),
        ("glm4_moe", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("mixtral", {"sliding_window": 128}, "sliding_window"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * LAYERS}, "layer_types"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "rope_scaling"),
        ("qwen3", {"rope_theta": 5e5}, "rope_theta"),
    ],
)
def test_what_is_not_expressed_is_refused_by_name(copy, family: str, changes: dict, field: str) -> None:
    path = copy(family)
    edit_config(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(path)
    assert caught.value.field == field and "config.json" in str(caught.value)


def test_a_known_family_that_cannot_be_trained_says_what_is_missing(copy) -> None:
    path = copy("qwen3")
    edit_config(path, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])
    with pytest.raises(ConfigError, match="gated delta net.*packed sequences.*qwen3_next"):
        read_hf_config(path)
    assert not REFUSED.keys() & KNOWN.keys()


def test_settings_are_those_of_the_file(copy, model) -> None:
    path, right = copy("deepseek_v3"), read_hf_config(model("deepseek_v3"))
    rope = {"rope_type": "default", "rope_theta": 5e5}
    edit_config(path, rope_parameters=rope, routed_scaling_factor=1.0, tie_word_embeddings=True)
    edited = replace(right, rope_theta=5e5, router=replace(right.router, scaling=1.0), tied_embeddings=True)
    assert read_hf_config(path) == edited != right


def test_rotary_settings_mean_the_same_in_both_places(copy, model) -> None:
    path, new = copy("deepseek_v2"), read_hf_config(model("deepseek_v2"))
    nested = json.loads((path / "config.json").read_text())["rope_parameters"]
    old = {"type": nested.pop("rope_type"), **{name: value for name, value in nested.items() if name != "rope_theta"}}
    edit_config(path, rope_parameters=..., rope_scaling=old, rope_theta=nested["rope_theta"])
    assert read_hf_config(path) == new and new.rotary.kind == "yarn" and new.rotary.mscale_all_dim == 0.707


def with_mtp(path: Path) -> list[str]:
    """Add one multi-token-prediction layer to a checkpoint; returns its tensors' names."""
    names = [f"model.layers.{LAYERS}.eh_proj.weight", f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight"]
    edit_config(path, num_nextn_predict_layers=1)
    edit_tensors(path, lambda tensors: tensors.update({name: torch.randn(4, 3) for name in names}))
    return names


@pytest.mark.parametrize("mtp", ["drop", "keep"])
def test_prediction_layers_are_dropped_or_kept_but_never_in_silence(copy, tmp_path: Path, mtp: str) -> None:
    path = copy("deepseek_v3")
    names = with_mtp(path)
    config = read_hf_config(path, mtp=mtp)
    report = audit_checkpoint(SafetensorsReader(path), config)
    assert report.problems == () and len(report.notes) == 1
    fate = {"drop": "dropped: exports leave them out", "keep": "copied to exports as they are"}[mtp]
    assert f"2 tensors of 1 multi-token-prediction layer(s) from model.layers.{LAYERS}" in report.notes[0]
    assert report.notes[0].endswith(fate)
    with StreamingWriter(tmp_path / "out", config, path) as writer:
        for name, tensor in there_and_back(path, 1):
            writer.write(name, tensor)
    written, stored = tensors_of(tmp_path / "out"), tensors_of(path)
    kept = names if mtp == "keep" else []
    assert written.keys() == {name for name in stored if name not in names} | set(kept)
    assert all(torch.equal(written[name], stored[name]) for name in written)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == len(kept) // 2


def test_layers_beyond_the_declared_ones_are_unexpected(copy) -> None:
    path = copy("deepseek_v3")
    names = with_mtp(path)
    edit_config(path, num_nextn_predict_layers=0)
    report = audit_checkpoint(SafetensorsReader(path), read_hf_config(path))
    assert report.of("unexpected") == names and report.notes == ()


def test_a_lost_expert_is_counted(copy) -> None:
    path = copy("deepseek_v3")
    lost = [f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")]
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in lost])
    report = audit_checkpoint(SafetensorsReader(path), read_hf_config(path))
    assert sorted(report.of("missing")) == sorted(lost)
    (problem,) = [problem for problem in report.problems if problem.kind == "experts"]
    assert (problem.tensor, problem.found, problem.expected) == ("model.layers.2", 7, "8 whole experts")
