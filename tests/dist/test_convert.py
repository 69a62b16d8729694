"""Checkpoints of runs become HF directories without a model: equal to what the live models export, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.backend.anchor import swapped_in
from megatron_rl.errors import CheckpointError
from megatron_rl.hf.conversion.conversion import Share, convert
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.conversion.verify import verify
from megatron_rl.training.checkpoint import save_checkpoint
from megatron_rl.training.checkpoint_source import RunSource, compare_outputs, find_checkpoint, open_source
from megatron_rl.training.score import score_batch
from megatron_rl.training.update import update_actor, update_critic
from tests.dist.experiment import Weights, start, whole
from tests.dist.pool import RankPool
from tests.dist.scenario import Layout, Scenario
from tests.hf.models import write_model

LAYOUTS = [
    Layout("TP2 PP2 EP2", 4, dict(tensor=2, pipeline=2, expert=2)),
    Layout("EP2 ETP2 bfloat16", 4, dict(expert=2, expert_tensor=2), dtype="bfloat16"),
]
STATES = [("actor", "weights"), ("actor", "ewma"), ("actor", "reference"), ("critic", "weights")]


def train_and_save(scenario: Scenario, layout: Layout, root: Path) -> dict[str, Weights]:
    """One update of each, a checkpoint, and what the live models then export, by role and state."""
    models = start(scenario, layout)
    scored = score_batch(models, scenario.batch)
    update_actor(models, scored, scored.rows)
    update_critic(models, scored, scored.rows)
    save_checkpoint(root, 1, models, {"iteration": 1}, keep=1)
    found = {"actor.weights": whole(models.actor.model), "critic.weights": whole(models.critic.model)}
    for state, pieces in (("ewma", models.anchor.average), ("reference", models.reference.weights)):
        with swapped_in(models.actor, [piece.clone() for piece in pieces]):
            found[f"actor.{state}"] = whole(models.actor.model)
    return found if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def saved(request, ranks: RankPool, scenario: Scenario, tmp_path_factory) -> tuple[Layout, Path, dict[str, Weights]]:
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    return request.param, root, ranks.run(train_and_save, request.param.world, scenario, request.param, root)[0]


@pytest.mark.parametrize(("role", "state"), STATES)
def test_a_run_becomes_what_its_models_export(saved, tmp_path, role: str, state: str) -> None:
    layout, root, live = saved
    source = open_source(root.parent, role=role, state=state)
    plan = make_plan(source, dtype=getattr(torch, layout.dtype), max_shard_bytes=50_000)
    for index in (1, 0):
        convert(source, tmp_path / "out", plan, share=Share(index, 2))
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    expected = live[f"{role}.{state}"]
    assert written.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(written[name], expected[name])] == []
    assert verify(source, tmp_path / "out", plan).tensors == len(expected)
    source.check_bytes(Share())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_transformers_gives_the_outputs_of_megatron(saved, tmp_path, ranks: RankPool, role: str) -> None:
    source = open_source(saved[1].parent, role=role)
    convert(source, tmp_path / "out", make_plan(source))
    (found,) = ranks.run(compared, 1, tmp_path / "out")
    assert found.difference <= 1e-5 and found.scale > 0.1 and found.same_choice == found.positions == 24


def test_a_family_with_group_limited_routing_is_compared_with_its_own_router(tmp_path, ranks: RankPool) -> None:
    (found,) = ranks.run(compared, 1, write_model(tmp_path, "deepseek_v3"))
    assert found.difference <= 1e-5 and found.scale > 0.1


def compared(path: Path):
    """In a rank process, whose group of one rank is used."""
    return compare_outputs(path, range(1, 25))


def test_exchanged_gate_and_up_show_in_the_outputs_only(saved, tmp_path, ranks: RankPool) -> None:
    source = open_source(saved[1].parent)
    convert(source, tmp_path / "out", make_plan(source))
    (text,) = ranks.run(exchanged, 1, tmp_path / "out")
    assert "differ from transformers'" in text


def exchanged(path: Path) -> str:
    """The error of a comparison whose Megatron side sees gate and up exchanged."""
    from megatron_rl.training import checkpoint_source as module

    original = module.outputs

    def swapped(place, tokens):
        other = Path(f"{place}-exchanged")
        shutil.copytree(place, other)
        tensors = load_file(other / "model.safetensors")
        renamed = {
            re.sub("gate_proj|up_proj", lambda m: {"gate_proj": "up_proj", "up_proj": "gate_proj"}[m[0]], name): value
            for name, value in tensors.items()
        }
        save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
        return original(str(other), tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "outputs", swapped)
        with pytest.raises(CheckpointError) as caught:
            compare_outputs(path, range(1, 25))
    return str(caught.value)


def test_missing_states_wrong_models_and_damage_are_named(saved, scenario, tmp_path) -> None:
    _, root, _ = saved
    with pytest.raises(CheckpointError, match="lacks these weights") as caught:
        RunSource(root, role="critic", state="ewma")
    assert caught.value.field == "critic.ewma" and "critic.weights" in str(caught.value)
    other = shutil.copytree(scenario.checkpoints["actor"], tmp_path / "other")
    values = json.loads((other / "config.json").read_text()) | {"vocab_size": 67}
    (other / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="another model") as caught:
        RunSource(root, directory=other)
    assert caught.value.field == "vocab_size" and caught.value.setting == "--hf"
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path)
    copy = shutil.copytree(find_checkpoint(root), tmp_path / "iteration_00000001")
    source = RunSource(copy)
    torn = max(copy.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(torn.read_bytes())
    data[len(data) // 2] ^= 4
    torn.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        source.check_bytes(Share())
    torn.write_bytes(data[: len(data) // 3])
    with pytest.raises(CheckpointError, match="missing or torn"):
        convert(source, tmp_path / "out", make_plan(source))
    with pytest.raises(CheckpointError, match="not complete"):
        RunSource(copy)
    assert not (tmp_path / "out").exists()
