"""HF → every shard of every rank → HF, bit for bit, under each parallel layout and both naming schemes."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megatron_rl.errors import CheckpointError
from megatron_rl.hf import families
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.exporter import join_shards, split_full
from megatron_rl.hf.importer import ParamRef, load_shard
from megatron_rl.hf.inventory import expected_names
from megatron_rl.hf.reader import SafetensorsReader
from megatron_rl.hf.writer import StreamingWriter
from tests.unit.hf.checkpoints import VARIANTS, Layout, make_model, references, round_trip, slow_shard, tensors_of

LAYOUTS = [
    Layout(),
    Layout(te=True),
    Layout(tp=2, pp=2, ep=2),
    Layout(tp=2, pp=2, ep=2, etp=2, te=True),
    Layout(ep=3, etp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_shard_is_right_and_the_way_back_is_bit_exact(checkpoint, variant, layout):
    path = checkpoint(variant)
    stored, reader, config = tensors_of(path), SafetensorsReader(path), read_hf_config(path)
    for refs in references(config, layout):
        for ref in refs:
            shard = load_shard(reader, config, ref)
            assert torch.equal(shard, slow_shard(stored, config, ref)), ref
            assert tuple(shard.shape) == ref.shape

    back = list(round_trip(reader, config, layout))
    assert len(back) == len(dict(back)) == len(stored)
    assert all(torch.equal(stored[name], value) for name, value in back)


def test_expected_names_are_what_transformers_writes(checkpoint):
    for variant in VARIANTS:
        path = checkpoint(variant)
        shapes = {name: tuple(value.shape) for name, value in tensors_of(path).items()}
        assert expected_names(read_hf_config(path)) == shapes


def test_stacked_experts_give_the_same_shards(checkpoint, tmp_path):
    per_expert = checkpoint("dense_layers")
    make_model(**VARIANTS["dense_layers"]).save_pretrained(tmp_path, save_original_format=False)
    reader = SafetensorsReader(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in reader
    config, stored = read_hf_config(tmp_path), tensors_of(per_expert)
    back = dict(round_trip(reader, config, Layout(tp=2, ep=2, etp=2)))
    assert back.keys() == stored.keys()
    assert all(torch.equal(stored[name], value) for name, value in back.items())


def test_exported_checkpoint_gives_equal_logits_in_transformers(checkpoint, tmp_path):
    source = checkpoint("dense_layers")
    reader, config = SafetensorsReader(source), read_hf_config(source)
    with StreamingWriter(tmp_path / "out", config, source, max_shard_bytes=40_000) as writer:
        for name, value in round_trip(reader, config, Layout(tp=2, ep=2)):
            writer.write(name, value)
    tokens = torch.arange(48).reshape(2, 24)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
        for path in (source, tmp_path / "out")
    )
    assert torch.equal(before, after)


def test_exchanged_gate_and_up_pass_the_round_trip_but_not_the_layout(checkpoint, monkeypatch):
    """A wrong table undoes itself on the way back: only the comparison with the slow layout can see it."""
    path = checkpoint("plain")
    stored, reader, config = tensors_of(path), SafetensorsReader(path), read_hf_config(path)
    wrong = tuple(
        replace(rule, sources=rule.sources[::-1]) if rule.canonical == "mlp.experts.linear_fc1.weight" else rule
        for rule in families.TABLES["qwen3_moe"]
    )
    monkeypatch.setitem(families.TABLES, "qwen3_moe", wrong)
    assert all(torch.equal(stored[name], value) for name, value in round_trip(reader, config, Layout()))
    ref = ParamRef("mlp.experts.linear_fc1.weight", 1, 3, 0, 1, (40, 32))
    assert not torch.equal(load_shard(reader, config, ref), slow_shard(stored, config, ref))


def test_a_shard_owns_its_memory(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("plain"), tmp_path / "copy")
    reader, config = SafetensorsReader(path), read_hf_config(path)
    ref = ParamRef("mlp.router.weight", 1, None, 0, 1, (6, 32))
    load_shard(reader, config, ref).zero_()
    assert torch.equal(load_shard(reader, config, ref), tensors_of(path)["model.layers.1.mlp.gate.weight"])


def test_dtype_of_the_checkpoint_is_kept(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("plain"), tmp_path / "half")
    stored = {name: value.bfloat16() for name, value in tensors_of(path).items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    back = dict(round_trip(SafetensorsReader(path), read_hf_config(path), Layout(tp=2, etp=2)))
    assert all(value.dtype == torch.bfloat16 and torch.equal(stored[name], value) for name, value in back.items())


def test_rank_with_only_padding_rows_gets_zeros(checkpoint):
    path = checkpoint("plain")
    ref = ParamRef("embedding.word_embeddings.weight", None, None, 3, 4, (24, 32))
    assert not load_shard(SafetensorsReader(path), read_hf_config(path), ref).any()


QKV, EMBEDDING, FC2 = (
    "self_attention.linear_qkv.weight",
    "embedding.word_embeddings.weight",
    "mlp.experts.linear_fc2.weight",
)


@pytest.mark.parametrize(
    ("ref", "word"),
    [
        (ParamRef(QKV, 0, None, 0, 4, (24, 32)), "parallel.tensor"),
        (ParamRef(QKV, 0, None, 0, 1, (48, 32)), "does not fit"),
        (ParamRef(EMBEDDING, None, None, 0, 2, (30, 32)), "too small"),
        (ParamRef(QKV, 4, None, 0, 1, (96, 32)), "layer 4"),
        (ParamRef(FC2, 2, 0, 0, 1, (32, 20)), "layer 2, expert 0"),
        (ParamRef(FC2, 1, 6, 0, 1, (32, 20)), "expert 6"),
        (ParamRef("mlp.experts.weight1", 1, None, 0, 1, (32, 20)), "no HF name"),
        (ParamRef("value_head.weight", None, None, 0, 1, (1, 32)), "no HF name"),
    ],
)
def test_impossible_parameters_are_refused(checkpoint, ref, word):
    path = checkpoint("dense_layers")
    with pytest.raises(CheckpointError, match=word) as caught:
        load_shard(SafetensorsReader(path), read_hf_config(path), ref)
    assert ref.canonical in str(caught.value)


def test_replicas_that_drifted_apart_are_refused(checkpoint):
    config = read_hf_config(checkpoint("plain"))
    router = torch.ones(6, 32)
    with pytest.raises(CheckpointError, match=r"replicas.*mlp\.router\.weight.*rank 1"):
        join_shards("mlp.router.weight", [router, router + 1e-7], config)


def test_a_whole_parameter_of_wrong_shape_is_refused(checkpoint):
    config = read_hf_config(checkpoint("plain"))
    with pytest.raises(CheckpointError, match="mlp.router.weight"):
        list(split_full("mlp.router.weight", torch.ones(32, 6), config, layer=0))
