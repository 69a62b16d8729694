"""Checkpoints of real models: the next step repeats bit for bit, layouts continue each other, failures lose nothing."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megatron_rl.backend.anchor import swapped_in
from megatron_rl.backend.sharded_checkpoint import ModelStates, load_states
from megatron_rl.config import RunConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.training import checkpoint
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.checkpoint import load_checkpoint, newest_complete, save_checkpoint
from megatron_rl.training.score import score_batch
from megatron_rl.training.update import update_actor, update_critic
from tests.dist.experiment import Weights, start, whole
from tests.dist.pool import RankFailure, RankPool
from tests.dist.scenario import SHAPE, Layout, Scenario, draw_weights, perturbed, recorded_batch, write_checkpoint

ONE = Layout("one rank")
BOTH = Layout("TP2 PP2 EP2", 4, dict(tensor=2, pipeline=2, expert=2))
DATA = Layout("DP4 EP2", 4, dict(expert=2))
TWO = Layout("DP2", 2)
TENSOR = Layout("TP2", 2, dict(tensor=2))
EXPERT = Layout("EP2", 2, dict(expert=2))
WHOLE = Layout("DP2, optimizer not distributed", 2, dict(distributed_optimizer=False))
CHUNKS = Layout("PP2 VPP2", 2, dict(pipeline=2, virtual_pipeline=2))
CURSOR = {"iteration": 7, "shards": ["a", "b"], "share": 0.1, "none": None}


@dataclass(frozen=True)
class Unpadded(Scenario):
    """The experiment with 61 vocabulary rows at TP1 and 62 at TP2."""

    def config(self, layout: Layout) -> RunConfig:
        config = super().config(layout)
        return config.model_copy(update={"model": config.model.model_copy(update={"vocab_multiple": 1})})


@dataclass
class Trace:
    """What one rank saw at the checkpoint and in the step after it."""

    pieces: dict[str, list[torch.Tensor]]
    """Model and state → this rank's own tensors, then the live parameters."""
    states: dict[str, Weights]
    """Model and state → whole HF tensors, where other layouts are compared."""
    numbers: tuple
    draws: list[float]
    """One number of each random generator."""
    metrics: dict[str, float]
    after: dict[str, list[torch.Tensor]]
    """`pieces` after the step."""
    after_weights: dict[str, Weights]
    cursor: dict
    skipped: tuple


def states_of(models: ActorCritic) -> dict[str, ModelStates]:
    return {
        "actor": ModelStates(models.actor, models.anchor, models.reference),
        "critic": ModelStates(models.critic),
    }


def own_pieces(models: ActorCritic) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, agent in states_of(models).items():
        found |= {f"{name}.{kind}": [x.clone() for x in pieces] for kind, pieces in agent.tensors().items()}
        parameters = [p for chunk in agent.optimizer.model.bare for p in chunk.parameters()]
        found[f"{name}.model"] = [p.detach().clone() for p in parameters]
    return found


def whole_states(models: ActorCritic) -> dict[str, Weights]:
    """Seen without the checkpoint's own way of putting tensors together: shown in the model, exported to HF names."""
    found = {}
    for name, agent in states_of(models).items():
        for kind, pieces in agent.tensors().items():
            with swapped_in(agent.optimizer, [x.clone() for x in pieces]):
                found[f"{name}.{kind}"] = whole(agent.optimizer.model)
    return found if dist.get_rank() == 0 else {}


def whole_weights(models: ActorCritic) -> dict[str, Weights]:
    found = {name: whole(agent.optimizer.model) for name, agent in states_of(models).items()}
    return found if dist.get_rank() == 0 else {}


def numbers_of(models: ActorCritic) -> tuple:
    steps = [
        (optimizer.steps, *(group["step"] for part in optimizer.parts for group in part.optimizer.param_groups))
        for optimizer in (models.actor, models.critic)
    ]
    return models.version, models.anchor and models.anchor.z, steps[0], steps[1]


def draw() -> list[float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.standard_normal()), float(torch.rand(())), tracked]


def update(models: ActorCritic, scored) -> dict[str, float]:
    return update_actor(models, scored, scored.rows) | update_critic(models, scored, scored.rows)


def trace(models: ActorCritic, scored, cursor: dict, skipped: tuple, compared: bool) -> Trace:
    before = (own_pieces(models), whole_states(models) if compared else {}, numbers_of(models), draw())
    metrics = update(models, scored)
    return Trace(*before, metrics, own_pieces(models), whole_weights(models) if compared else {}, cursor, skipped)


def train_save_go_on(scenario: Scenario, layout: Layout, root: Path) -> Trace:
    models = start(scenario, layout)
    scored = score_batch(models, scenario.batch)
    for _ in range(2):
        update(models, scored)
    models.version = 11
    # A sum of floats would lose this sign.
    models.anchor.average[0].view(-1)[0] = -0.0
    random.seed(dist.get_rank()), np.random.seed(dist.get_rank() + 10), torch.manual_seed(dist.get_rank() + 20)
    draw()
    save_checkpoint(root, 2, models, CURSOR, keep=2)
    # In bfloat16 looking through the model would round.
    return trace(models, scored, CURSOR, (), layout.dtype == "float32")


def resume(scenario: Scenario, layout: Layout, root: Path, compared: bool = False) -> Trace:
    models = start(scenario, layout)
    scored = score_batch(models, scenario.batch)
    found = newest_complete(root)
    return trace(models, scored, load_checkpoint(found.path, models), found.skipped, compared)


def write_scenario(folder: Path, **settings) -> Scenario:
    shape = replace(SHAPE, tie_embeddings=settings.get("tie_word_embeddings", False))
    reference = draw_weights(shape, "lm", 1)
    if shape.tie_embeddings:
        del reference["lm_head.weight"]
    parts = {
        "reference": reference,
        "anchor": perturbed(reference, 0.02, 2),
        "actor": perturbed(reference, 0.01, 3),
        "old_critic": draw_weights(shape, "value", 4),
    }
    parts = {name: write_checkpoint(folder / name, shape, weights, **settings) for name, weights in parts.items()}
    return Unpadded(parts, recorded_batch(5))


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return write_scenario(tmp_path_factory.mktemp("scenario"))


Saved = Callable[[Layout], tuple[Path, list[Trace]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Layout → root of a checkpoint it wrote, and what its ranks saw. Each layout runs once."""
    done: dict[tuple[str, str], tuple[Path, list[Trace]]] = {}

    def run(layout: Layout) -> tuple[Path, list[Trace]]:
        key = (layout.name, layout.dtype)
        if key not in done:
            root = tmp_path_factory.mktemp("root") / "checkpoints"
            done[key] = root, ranks.run(train_save_go_on, layout.world, scenario, layout, root)
        return done[key]

    return run


def assert_same_bits(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for mine, theirs in zip(found[name], tensors, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(_bits(mine), _bits(theirs)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def largest_difference(found: dict[str, Weights], expected: dict[str, Weights]) -> float:
    assert found.keys() == expected.keys()
    worst = 0.0
    for state, weights in expected.items():
        assert found[state].keys() == weights.keys()
        worst = max([worst, *(float((found[state][name] - w).abs().max()) for name, w in weights.items())])
    return worst


@pytest.mark.parametrize(
    "layout",
    [
        BOTH,
        pytest.param(DATA, marks=pytest.mark.full),
        replace(TWO, dtype="bfloat16"),
        pytest.param(replace(WHOLE, dtype="bfloat16"), marks=pytest.mark.full),
    ],
    ids=lambda layout: f"{layout.name}, {layout.dtype}",
)
def test_the_same_layout_repeats_the_next_step_bit_for_bit(ranks, scenario, saved, layout: Layout) -> None:
    root, expected = saved(layout)
    for mine, theirs in zip(ranks.run(resume, layout.world, scenario, layout, root), expected, strict=True):
        assert mine.cursor == CURSOR and mine.skipped == ()
        assert mine.numbers == theirs.numbers and mine.numbers[0] == 11 and set(mine.numbers[2]) == {2}
        assert_same_bits(mine.pieces, theirs.pieces)
        assert mine.draws == theirs.draws
        assert mine.metrics == theirs.metrics
        assert_same_bits(mine.after, theirs.after)
    assert expected[0].draws != expected[1].draws
    assert any(bool(x.any()) for x in expected[0].pieces["actor.exp_avg"])
    weights, average = (expected[0].pieces[f"actor.{kind}"] for kind in ("weights", "ewma"))
    assert not all(torch.equal(a, b) for a, b in zip(weights, average, strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [(BOTH, EXPERT), (BOTH, ONE), (BOTH, CHUNKS), (DATA, WHOLE), (DATA, TENSOR)],
    ids=lambda layout: layout.name,
)
def test_another_layout_continues_within_rounding(ranks, scenario, saved, before: Layout, after: Layout) -> None:
    root, expected = saved(before)
    found = ranks.run(resume, after.world, scenario, after, root, True)
    assert found[0].numbers[:2] == expected[0].numbers[:2]
    assert largest_difference(found[0].states, expected[0].states) == 0
    assert largest_difference(found[0].after_weights, expected[0].after_weights) < 1e-6
    for name, value in expected[0].metrics.items():
        if not name.endswith("micro_batches"):
            assert found[0].metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_tied_embeddings_are_one_tensor_in_every_layout(ranks, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, tie_word_embeddings=True)
    stages = Layout("PP2", 2, dict(pipeline=2))
    expected = ranks.run(train_save_go_on, 2, scenario, stages, tmp_path / "root")
    found = ranks.run(resume, 1, scenario, ONE, tmp_path / "root", True)
    assert largest_difference(found[0].states, expected[0].states) == 0
    assert largest_difference(found[0].after_weights, expected[0].after_weights) < 1e-6


def die(*_args, **_kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_second_save(scenario: Scenario, root: Path, called: str) -> None:
    """The process is killed where the second save first calls this function."""
    models = start(scenario, ONE)
    save_checkpoint(root, 1, models, {"iteration": 1}, keep=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(called, die)
        save_checkpoint(root, 2, models, {"iteration": 2}, keep=5)


def resume_and_save(scenario: Scenario, root: Path, iteration: int) -> tuple:
    """(newest directory, reasons for skipping, cursor, directories after another save)."""
    models = start(scenario, ONE)
    found = newest_complete(root)
    cursor = load_checkpoint(found.path, models)
    save_checkpoint(root, iteration, models, {"iteration": iteration}, keep=5)
    return found.path.name, [reason for _, reason in found.skipped], cursor, sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("called", ["os.fsync", f"{checkpoint.__name__}._manifest"])
def test_killed_while_saving_leaves_the_previous_one(ranks, scenario, tmp_path: Path, called: str) -> None:
    with pytest.raises(RankFailure, match="process died"):
        ranks.run(die_in_second_save, 1, scenario, tmp_path, called)
    assert len(list(tmp_path.rglob("*.distcp"))) == 2
    ((newest, reasons, cursor, names),) = ranks.run(resume_and_save, 1, scenario, tmp_path, 2)
    assert newest == "iteration_00000001" and cursor == {"iteration": 1}
    assert reasons == ["manifest.json is missing: a save or a removal did not finish"]
    assert names == ["iteration_00000001", "iteration_00000002"]


def test_killed_just_before_the_rename_loses_nothing(ranks, scenario, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="process died"):
        ranks.run(die_in_second_save, 1, scenario, tmp_path, f"{checkpoint.__name__}._publish")
    ((newest, reasons, cursor, names),) = ranks.run(resume_and_save, 1, scenario, tmp_path, 3)
    assert (reasons, cursor) == ([], {"iteration": 2})
    assert newest.startswith(".iteration_00000002.") and newest.endswith(".partial")
    assert names == ["iteration_00000001", "iteration_00000002", "iteration_00000003"]


def message_of(work: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def full_disk_then_damage(scenario: Scenario, root: Path) -> tuple:
    """(error of a save that rank 1 could not write, error without room, names after them, newest of a damaged root)."""
    models = start(scenario, EXPERT)
    save = partial(save_checkpoint, root, models=models, keep=2)
    save(1, cursor={"iteration": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    refused = message_of(lambda: save(2, cursor={}))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        crowded = message_of(lambda: save(2, cursor={}))
    dist.barrier()
    names = sorted(p.name for p in root.iterdir())
    dist.barrier()
    path = save(2, cursor={"iteration": 2})
    if dist.get_rank() == 0:
        flip_a_bit(next(path.rglob("__1_*.distcp")))
    dist.barrier()
    found = newest_complete(root)
    return refused, crowded, names, found, load_checkpoint(found.path, models)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_full_disk_and_damage_are_told_on_every_rank_and_the_previous_one_loads(
    ranks, scenario, tmp_path: Path
) -> None:
    for refused, crowded, names, found, cursor in ranks.run(full_disk_then_damage, 2, scenario, tmp_path):
        assert "could not be written" in refused
        assert "no room for a checkpoint" in crowded and "0.000 GB free" in crowded
        assert names == ["iteration_00000001"]
        assert found.path == tmp_path / "iteration_00000001" and cursor == {"iteration": 1}
        ((path, reason),) = found.skipped
        assert path == tmp_path / "iteration_00000002" and "__1_0.distcp has checksum" in reason


def save_once(scenario: Scenario, layout: Layout, root: Path) -> Path:
    return save_checkpoint(root, 1, start(scenario, layout), {}, keep=1)


def loading_error(scenario: Scenario, layout: Layout, path: Path) -> str:
    models = start(scenario, layout)
    return message_of(lambda: load_checkpoint(path, models))


def load_only(scenario: Scenario, layout: Layout, path: Path) -> dict:
    return load_checkpoint(path, start(scenario, layout))


BARE = dict(anchor="recompute", reference_kl="none")


def test_a_state_that_is_missing_is_an_error(ranks, scenario, tmp_path: Path) -> None:
    (path,) = ranks.run(save_once, 1, scenario, replace(ONE, algorithm=BARE), tmp_path)
    (ewma,) = ranks.run(loading_error, 1, scenario, replace(ONE, algorithm=BARE | {"anchor": "ewma"}), path)
    assert "no EWMA anchor" in ewma and "algorithm.anchor" in ewma and str(path) in ewma
    # On two ranks each misses other tensors; all raise.
    kl = replace(EXPERT, algorithm=BARE | {"reference_kl": {"name": "loss", "coef": 0.1}})
    for reference in ranks.run(loading_error, 2, scenario, kl, path):
        assert "state missing" in reference and "actor.reference." in reference


def test_states_the_run_has_no_use_for_are_left_alone(ranks, scenario, saved) -> None:
    path = newest_complete(saved(BOTH)[0]).path
    assert ranks.run(load_only, 1, scenario, replace(ONE, algorithm=BARE), path) == [CURSOR]


def other_model_error(scenario: Scenario, path: Path) -> str:
    models = start(scenario, ONE)
    numbers = json.loads((path / "states" / "states.json").read_text())
    numbers["critic"]["model"]["vocab_size"] = 62
    (path / "states" / "states.json").write_text(json.dumps(numbers))
    return message_of(lambda: load_states(path / "states", states_of(models)))


def test_another_model_is_refused(ranks, scenario, tmp_path: Path) -> None:
    (path,) = ranks.run(save_once, 1, scenario, ONE, tmp_path)
    (message,) = ranks.run(other_model_error, 1, scenario, path)
    assert "another model" in message and "critic.vocab_size" in message and "found 62, expected 61" in message
    (incomplete,) = ranks.run(loading_error, 1, scenario, ONE, tmp_path / "nowhere")
    assert "manifest.json is missing" in incomplete
