"""Checkpoints of real agents: the next step repeats bit for bit, any layout continues any other, and failures leave the last one."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megatron_rl.backend.anchor import swapped_in
from megatron_rl.backend.checkpoint import AgentStates, load_states
from megatron_rl.errors import CheckpointError
from megatron_rl.training import checkpoint
from megatron_rl.training.agents import Agents
from megatron_rl.training.checkpoint import load_checkpoint, newest_complete, save_checkpoint
from megatron_rl.training.score import score_batch
from megatron_rl.training.update import update_actor, update_critic
from tests.dist.experiment import Weights, start, whole
from tests.dist.pool import RankFailure, RankPool
from tests.dist.scenario import SHAPE, Layout, Scenario, draw_weights, perturbed, recorded_batch, write_checkpoint

ONE = Layout("one rank")
BOTH = Layout("TP2 PP2 EP2", 4, dict(tensor=2, pipeline=2, expert=2))
DATA = Layout("DP4 EP2", 4, dict(expert=2))
TENSOR = Layout("TP2", 2, dict(tensor=2))
EXPERT = Layout("EP2", 2, dict(expert=2))
WHOLE = Layout("DP2, optimizer not distributed", 2, dict(distributed_optimizer=False))
CHUNKS = Layout("PP2 VPP2", 2, dict(pipeline=2, virtual_pipeline=2))
CURSOR = {"iteration": 7, "shards": ["a", "b"], "share": 0.1, "none": None}


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


def states_of(agents: Agents) -> dict[str, AgentStates]:
    return {
        "actor": AgentStates(agents.actor, agents.anchor, agents.reference),
        "critic": AgentStates(agents.critic),
    }


def own_pieces(agents: Agents) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, agent in states_of(agents).items():
        found |= {f"{name}.{kind}": [x.clone() for x in pieces] for kind, pieces in agent.tensors().items()}
        parameters = [p for chunk in agent.optimizer.model.bare for p in chunk.parameters()]
        found[f"{name}.model"] = [p.detach().clone() for p in parameters]
    return found


def whole_states(agents: Agents) -> dict[str, Weights]:
    """Seen without the checkpoint's own way of putting tensors together: shown in the model and exported to HF names."""
    found = {}
    for name, agent in states_of(agents).items():
        for kind, pieces in agent.tensors().items():
            with swapped_in(agent.optimizer, [x.clone() for x in pieces]):
                found[f"{name}.{kind}"] = whole(agent.optimizer.model)
    return found if dist.get_rank() == 0 else {}


def whole_weights(agents: Agents) -> dict[str, Weights]:
    found = {name: whole(agent.optimizer.model) for name, agent in states_of(agents).items()}
    return found if dist.get_rank() == 0 else {}


def numbers_of(agents: Agents) -> tuple:
    steps = [
        (optimizer.steps, *(group["step"] for part in optimizer.parts for group in part.optimizer.param_groups))
        for optimizer in (agents.actor, agents.critic)
    ]
    return agents.version, agents.anchor and agents.anchor.z, steps[0], steps[1]


def draw() -> list[float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.standard_normal()), float(torch.rand(())), tracked]


def update(agents: Agents, scored) -> dict[str, float]:
    return update_actor(agents, scored, scored.rows) | update_critic(agents, scored, scored.rows)


def trace(agents: Agents, scored, cursor: dict, skipped: tuple, compared: bool) -> Trace:
    before = (own_pieces(agents), whole_states(agents) if compared else {}, numbers_of(agents), draw())
    metrics = update(agents, scored)
    return Trace(*before, metrics, own_pieces(agents), whole_weights(agents) if compared else {}, cursor, skipped)


def train_save_go_on(scenario: Scenario, layout: Layout, root: Path) -> Trace:
    agents = start(scenario, layout)
    scored = score_batch(agents, scenario.batch)
    for _ in range(2):
        update(agents, scored)
    agents.version = 11
    random.seed(dist.get_rank()), np.random.seed(dist.get_rank() + 10), torch.manual_seed(dist.get_rank() + 20)
    draw()
    save_checkpoint(root, 2, agents, CURSOR, keep=2)
    # In bfloat16 looking through the model would round.
    return trace(agents, scored, CURSOR, (), layout.dtype == "float32")


def resume(scenario: Scenario, layout: Layout, root: Path, compared: bool = False) -> Trace:
    agents = start(scenario, layout)
    scored = score_batch(agents, scenario.batch)
    found = newest_complete(root)
    return trace(agents, scored, load_checkpoint(found.path, agents), found.skipped, compared)


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
    return Scenario(parts, recorded_batch(5))


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
    [BOTH, DATA, replace(DATA, dtype="bfloat16"), replace(WHOLE, dtype="bfloat16")],
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
    assert any(not torch.equal(a, b) for a, b in zip(expected[0].pieces["actor.weights"], expected[0].pieces["actor.ewma"]))


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
