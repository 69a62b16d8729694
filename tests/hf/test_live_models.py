"""HF checkpoints through live Megatron models: bit-exact round trips, and log-probs equal to transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.pool import RankPool

SEQUENCES = 4
LENGTH = 17


def write_model(path: Path, **changes) -> Path:
    """A tiny Qwen3-MoE with pairwise distinct dimensions and every tensor random, so that no swap hides."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape = {
        "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 128,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape | changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0, 0.1) if weight.ndim == 1 else weight.normal_(0.0, 0.1)
    model.save_pretrained(path)
    return path


def tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab, (SEQUENCES, LENGTH)).astype(np.int32)


def expected_logprobs(path: Path) -> torch.Tensor:
    """[SEQUENCES · (LENGTH - 1)] log-probs of each next token, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.as_tensor(tokens(model.config.vocab_size).astype(np.int64))
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(2, ids[:, 1:, None]).flatten()


def through_megatron(path: Path, target: Path, parallel: dict, role: str) -> torch.Tensor:
    """Import with parameters poisoned first, read log-probs (or values), export; returns the readings."""
    from megatron_rl.backend import topology
    from megatron_rl.backend.micro_batch import RouteSpec, prepare_micro_batches
    from megatron_rl.backend.model import build_model, transformer_config
    from megatron_rl.backend.step import Readout, score
    from megatron_rl.backend.weights import import_hf
    from megatron_rl.batching import CostModel, actor_stream, plan_micro_batches
    from megatron_rl.config import ParallelConfig, PerformanceConfig
    from megatron_rl.hf.config import read_hf_config
    from megatron_rl.reduce import gather_slots
    from megatron_rl.training.publish import write_hf

    layout = ParallelConfig(**parallel)
    place = topology.initialize(layout, seed=1)
    source = read_hf_config(path)
    wanted = source.as_critic() if role == "value" else source
    model = build_model(wanted, transformer_config(wanted, layout, PerformanceConfig(), torch.float32), place, role)
    with torch.no_grad():
        for chunk in model.bare:
            for weight in chunk.parameters():
                weight.fill_(float("nan"))
    import_hf(model, str(path), source, head_seed=3)
    flat = tokens(source.vocab_size).reshape(-1)
    offsets = np.arange(0, len(flat) + 1, LENGTH)
    mask = np.ones(len(flat), bool)
    mask[offsets[:-1]] = False
    stream = actor_stream(flat, offsets, mask)
    plan = plan_micro_batches(
        stream.lengths, token_budget=48, data_ranks=place.dp, cp=layout.context, tp=layout.tensor, cost=CostModel(),
        count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
    )  # fmt: skip
    layers = {layer: source.moe_layers.index(layer) for layer in model.registry.layers}
    parts = prepare_micro_batches(stream, plan, place, RouteSpec(None, layers, source.num_experts, source.topk))
    slots, readings = score(model, parts, plan.length, Readout())
    write_hf(model, target, path)
    groups = {"data_group": place.dp_cp_group, "pipeline_group": place.pp_group}
    return gather_slots(slots, readings, stream.slots, has_values=place.last_stage, **groups)[0]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_tensors(found: Path, expected: Path) -> None:
    got, want = tensors(found), tensors(expected)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "dense first": {"mlp_only_layers": [0], "norm_topk_prob": False},
}
LAYOUTS = {
    "tp2·pp2·ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "ep2·etp2": (4, {"expert": 2, "expert_tensor": 2}),
    "pp2·vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2·ep2": (2, {"context": 2, "expert": 2}),
    "one rank": (1, {}),
}
CASES = [("plain", "tp2·pp2·ep2"), ("plain", "ep2·etp2"), ("tied", "pp2·vpp2"), ("tied", "tp2·pp2·ep2"),
         ("dense first", "one rank"), ("dense first", "cp2·ep2")]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    return {name: write_model(folder / name.replace(" ", "-"), **changes) for name, changes in SHAPES.items()}


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_round_trip_and_logprobs(ranks: RankPool, models, tmp_path: Path, shape: str, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    found = ranks.run(through_megatron, world, models[shape], tmp_path / "out", parallel, "policy")
    expected = expected_logprobs(models[shape])
    for readings in found:
        assert (readings - expected).abs().max() <= 2e-6
    assert_same_tensors(tmp_path / "out", models[shape])


def test_critic_keeps_its_head(ranks: RankPool, models, tmp_path: Path) -> None:
    world, parallel = LAYOUTS["tp2·pp2·ep2"]
    fresh = ranks.run(through_megatron, world, models["plain"], tmp_path / "critic", parallel, "value")[0]
    again = ranks.run(through_megatron, 1, tmp_path / "critic", tmp_path / "critic2", {}, "value")[0]
    assert fresh.abs().max() > 0 and (fresh - again).abs().max() <= 1e-5
    assert_same_tensors(tmp_path / "critic2", tmp_path / "critic")
    head = tensors(tmp_path / "critic")["score.weight"]
    assert head.shape == (1, 48) and head.abs().min() > 0
    backbone = {name: tensor for name, tensor in tensors(models["plain"]).items() if name != "lm_head.weight"}
    assert all(torch.equal(tensors(tmp_path / "critic")[name], tensor) for name, tensor in backbone.items())
