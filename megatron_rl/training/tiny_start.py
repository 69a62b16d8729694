"""A tiny policy that can spell actions, made from nothing: where runs on a CPU begin."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron_rl.backend.topology import Topology
from megatron_rl.config import RunConfig
from megatron_rl.engines.episodes import random_play
from megatron_rl.engines.tasks import Task
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.training.agents import build_agents
from megatron_rl.training.cold_start import learn_demonstrations
from megatron_rl.training.publish import write_hf

_ITERATION = 1_000_000
"""Training specs of this iteration are played: none that a run reaches."""


class TinyStart(NamedTuple):
    """What `cold_start` leaves behind."""

    path: Path
    """HF checkpoint of the policy."""
    losses: list[float]
    """Nats per token of each optimizer step."""


def starting_from(config: RunConfig, model: Path, output: Path, **changes) -> RunConfig:
    """The same run from another checkpoint, written elsewhere; `changes` replace further top-level settings."""
    updates = {"model": config.model.model_copy(update={"path": str(model)}), "output": str(output), **changes}
    return config.model_copy(update=updates)


def cold_start(
    config: RunConfig, topology: Topology, task: Task, output: Path, *, demonstrations: int, epochs: int,
    lr: float = 2e-3, sequences: int = 32, shape: TinyShape | None = None,
) -> TinyStart:  # fmt: skip
    """Teach a random model how actions are spelled and what the task answers, on random valid play. Collective.

    Which action is good is left to reinforcement learning.

    Args:
        config: seed, layout and limits of the episodes.
        output: `tiny` (random weights) and `cold-start` (trained ones) are written below it.
        demonstrations, epochs: random plays, and passes over them.
        lr: the actor's learning rate here.
        sequences: plays of one optimizer step.
        shape: sizes of the model; None: the defaults.
    """
    tiny = output / "tiny"
    if dist.get_rank() == 0:
        tiny.mkdir(parents=True, exist_ok=True)
        write_tiny_checkpoint(tiny, task.vocabulary, shape, seed=config.seed)
    dist.barrier()
    agents = build_agents(starting_from(config, tiny, output), topology)
    agents.actor.config = agents.actor.config.model_copy(update={"lr": lr})
    plays = random_play(
        task.make_env, task.training_specs(_ITERATION, demonstrations), max_turns=config.rollout.max_turns,
        context_limit=agents.actor.model.hf.max_positions, seed=config.seed,
    )  # fmt: skip
    losses: list[float] = []
    learn_demonstrations(
        agents, plays, epochs=epochs, minibatches=max(1, demonstrations // sequences), observations=True,
        on_step=losses.append,
    )  # fmt: skip
    return TinyStart(write_hf(agents.actor.model, output / "cold-start", tiny), losses)
