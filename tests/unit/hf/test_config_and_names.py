from __future__ import annotations

import shutil

import pytest

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.names import parse_parameter_name
from tests.unit.hf.checkpoints import edit_config


def test_fields_are_read(checkpoint):
    config = read_hf_config(checkpoint("dense_layers"))
    assert (config.model_type, config.head, config.vocab_size) == ("qwen3_moe", "lm", 61)
    assert (config.num_experts, config.topk, config.moe_layers) == (6, 2, (0, 1, 3))
    assert (config.rope_theta, config.norm_topk_prob, config.tied_embeddings) == (12345.0, False, False)
    assert (config.head_dim, config.ffn_size, config.moe_ffn_size, config.max_positions) == (12, 28, 20, 256)
    sparse = read_hf_config(checkpoint("sparse_step"))
    assert sparse.moe_layers == (1, 3) and sparse.tied_embeddings


def test_old_layout_of_config_json_means_the_same(checkpoint, tmp_path):
    new = checkpoint("plain")
    old = shutil.copytree(new, tmp_path / "old")
    changes = dict(rope_parameters=..., rope_theta=12345.0, rope_scaling=None, num_local_experts=..., num_experts=6)
    edit_config(old, **changes)
    assert read_hf_config(old) == read_hf_config(new)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_parameters": ...}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": "llama"}, "architectures"),
        ({"architectures": ["Qwen3MoeForQuestionAnswering"]}, "architectures"),
        ({"num_local_experts": ...}, "num_experts"),
        ({"norm_topk_prob": ...}, "norm_topk_prob"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ],
)
def test_each_unsupported_or_missing_setting_is_named(checkpoint, tmp_path, changes, field):
    path = shutil.copytree(checkpoint("plain"), tmp_path / "bad")
    edit_config(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(path)
    assert caught.value.field == field
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a": 1, "a": 2}'])
def test_broken_config_json_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ("module.module.embedding.word_embeddings.weight", ("embedding.word_embeddings.weight", None, None)),
        ("decoder.final_layernorm.weight", ("decoder.final_layernorm.weight", None, None)),
        ("decoder.layers.11.self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", 11, None)),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", ("pre_mlp_layernorm.weight", 0, None)),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight12", ("mlp.experts.linear_fc1.weight", 0, 12)),
        ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight", ("mlp.experts.linear_fc2.weight", 3, 7)),
        ("output_layer.weight", ("output_layer.weight", None, None)),
        ("mtp.layers.0.eh_proj.weight", ("mtp.layers.0.eh_proj.weight", None, None)),
    ],
)
def test_both_naming_schemes_lead_to_one_name(live, expected):
    parsed = parse_parameter_name(live)
    assert (parsed.canonical, parsed.layer, parsed.expert) == expected


def test_the_output_layer_of_a_critic_is_its_value_head():
    assert parse_parameter_name("module.output_layer.weight", value_head=True).canonical == "value_head.weight"
