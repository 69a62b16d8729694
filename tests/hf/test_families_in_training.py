"""What training adds to a family: replay of recorded routes, through each kind of router; and faults of a checkpoint
that only its outputs show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.conversion.conversion import convert
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.logits import compare_logits
from megatron_rl.hf.reader import SafetensorsReader
from megatron_rl.training.checkpoint_source import open_source
from tests.dist.pool import RankPool
from tests.hf import live
from tests.hf.models import write_model

ROUTERS = {
    "deepseek_v3": "sigmoid, bias, groups by their best two, shared experts, dense first layer",
    "deepseek_v2": "softmax before the choice, groups by their best one",
    "qwen2_moe": "a gated shared expert, a dense layer in between",
    "gpt_oss": "softmax after the choice, a bias in the router",
}
LAYOUTS = {
    "one rank, recomputed": (1, {"recompute": "full"}),
    "tp2 pp2 ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}
CASES = [pytest.param(family, "one rank, recomputed", id=family) for family in ROUTERS]
CASES.append(pytest.param("deepseek_v3", "tp2 pp2 ep2", id="deepseek_v3 over four ranks"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_recorded_routes_give_back_the_native_pass(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    """Gates come from training scores over the recorded ids, never from the ids' order or from biased scores."""
    path = write_model(tmp_path / family, family)
    config = read_hf_config(path)
    (routes,) = ranks.run(live.native_routes, 1, path)
    assert routes.shape == (live.SEQUENCES, len(config.moe_layers), live.LENGTH - 1, config.topk)
    others = (routes + 1) % config.num_experts
    world, parallel = LAYOUTS[layout]
    sets = {"native": None, "recorded": routes[..., ::-1], "others": others}
    passes = ranks.run(live.replay, world, path, parallel, sets)[0]
    native, recorded, moved = passes["native"], passes["recorded"], passes["others"]
    # The experts of a token are added in another order.
    assert (recorded.readings - native.readings).abs().max() <= 4e-6
    assert live.gradient_error(recorded.gradients, native.gradients)[0] <= 1e-6
    assert (moved.readings - native.readings).abs().max() > 1e-2
    assert recorded.agreed[0] == recorded.agreed[1] > 0 and moved.agreed[0] < moved.agreed[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe", "gpt_oss", "qwen2_moe"])
def test_checkpoints_of_training_reshard(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Modules of our own say how they are cut: a checkpoint of four ranks restores one, and the other way round."""
    path = write_model(tmp_path / "model", family)
    four, one = LAYOUTS["tp2 pp2 ep2"], (1, {})
    for name, (world, parallel), (again, other) in (("down", four, one), ("up", one, four)):
        ranks.run(live.save, world, path, parallel, tmp_path / name)
        assert ranks.run(live.load, again, path, other, tmp_path / name) == [[]] * again


def test_a_run_becomes_an_hf_directory_with_the_biases_of_its_routers(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing trains them, no optimizer state holds them: they come from the checkpoint the run began with."""
    path = write_model(tmp_path / "model", "deepseek_v3")
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_00000001"
    checkpoint.mkdir(parents=True)
    ranks.run(live.save, 1, path, {}, checkpoint / "states")
    (checkpoint / "run.json").write_text(json.dumps({"config": {"model": {"path": str(path), "critic_path": ""}}}))
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    seals = {
        str(file.relative_to(checkpoint)): {
            "bytes": file.stat().st_size,
            "xxh3_128": xxhash.xxh3_128(file.read_bytes()).hexdigest(),
        }
        for file in files
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"files": seals}))
    source = open_source(tmp_path / "run")
    convert(source, tmp_path / "out", make_plan(source))
    written, expected = live.tensors(tmp_path / "out"), live.tensors(path)
    assert any(name.endswith("e_score_correction_bias") for name in expected)
    assert written.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(written[name], expected[name].float())] == []


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many experts as hidden dimensions: its routers are square."""
    path = tmp_path_factory.mktemp("square") / "model"
    return write_model(path, "qwen3_moe", hidden_size=16, num_experts=16, num_hidden_layers=2)


def exchange(tensors: dict[str, torch.Tensor]) -> None:
    names = [f"model.layers.1.mlp.experts.4.{part}_proj.weight" for part in ("gate", "up")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"].T.contiguous()


def damaged(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
    from safetensors.torch import save_file

    shutil.copytree(source, target)
    if edit is not None:
        tensors = {name: tensor.clone() for name, tensor in live.tensors(source).items()}
        edit(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("edit", [exchange, transpose], ids=["gate and up exchanged", "router transposed"])
def test_what_no_audit_can_see_the_outputs_show(ranks: RankPool, square: Path, tmp_path: Path, edit) -> None:
    path = damaged(square, tmp_path / "damaged", edit)
    assert audit_checkpoint(SafetensorsReader(path), read_hf_config(path)).problems == ()
    tokens = live.tokens(62)
    right, wrong = (
        ranks.run(live.through_megatron, 1, source, tmp_path / "out", {}, "policy", False)[0].readings
        for source in (square, path)
    )
    compare_logits(right, square, tokens).raise_above(live.READINGS)
    with pytest.raises(CheckpointError, match="differs from transformers.*sequence.*nats"):
        compare_logits(wrong, square, tokens).raise_above(25 * live.READINGS)


def test_a_wrong_rotary_base_shows(ranks: RankPool, square: Path, tmp_path: Path) -> None:
    path = damaged(square, tmp_path / "damaged")
    settings = json.loads((path / "config.json").read_text())
    settings["rope_parameters"]["rope_theta"] = 2e4
    (path / "config.json").write_text(json.dumps(settings))
    assert read_hf_config(path).rope_theta == 2e4 != read_hf_config(square).rope_theta
    wrong = ranks.run(live.through_megatron, 1, path, tmp_path / "out", {}, "policy", False)[0].readings
    report = compare_logits(wrong, square, live.tokens(62))
    # Positions from 1 on turn otherwise; the first token sees only itself.
    assert report.worst > 25 * live.READINGS and report.position > 1


def test_readings_that_are_no_numbers_never_pass(square: Path) -> None:
    nothing = torch.full((2, live.SEQUENCES, live.LENGTH - 1), float("nan"))
    with pytest.raises(CheckpointError):
        compare_logits(nothing, square, live.tokens(62)).raise_above(1.0)
