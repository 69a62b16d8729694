"""Supervised warm start on demonstrations, and a tiny policy made from nothing for runs on a CPU.

The loss is −log π of action tokens, or of every token. On random play neither says which action is good. Action tokens
teach how an action is spelled; all tokens also teach what the environment answers, which the policy can build on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.step_losses import LikelihoodStepLoss, loss_weights
from megatron_rl.backend import platform
from megatron_rl.backend.step import train
from megatron_rl.backend.topology import Topology
from megatron_rl.batching import actor_stream, decision_offsets, split_minibatches
from megatron_rl.config import RunConfig
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.base import Task
from megatron_rl.episodes.lockstep import Demonstration, random_play
from megatron_rl.methods.aggregation_rules import TokenMean
from megatron_rl.reduce import from_last, sum_over
from megatron_rl.training.actor_critic import ActorCritic, build_actor_critic
from megatron_rl.training.forward import decisions_of, prepare, sampling_readout
from megatron_rl.training.weights import write_hf


def train_on_demonstrations(
    models: ActorCritic,
    demonstrations: list[Demonstration],
    *,
    epochs: int,
    minibatches: int,
    observations: bool = False,
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Train the actor on demonstrations; the critic is left alone.

    Args:
        demonstrations: the same on every rank.
        epochs, minibatches: passes, and optimizer steps in each.
        observations: learn to predict observation tokens too.
        on_step: called with the loss of each step, nats per action token.
    """
    offsets = np.concatenate([[0], np.cumsum([len(d.tokens) for d in demonstrations])])
    tokens = np.concatenate([d.tokens for d in demonstrations])
    mask = np.concatenate([d.action_mask for d in demonstrations])
    if observations:
        mask = np.ones(len(tokens), bool)
        mask[offsets[:-1]] = False
    stream, device = actor_stream(tokens, offsets, mask), platform.device()
    decisions = torch.as_tensor(decision_offsets(mask, offsets), device=device)
    prompts = torch.arange(len(demonstrations), device=device)
    for epoch in range(epochs):
        for rows in split_minibatches(len(demonstrations), minibatches, models.config.seed, epoch):
            weights = loss_weights(TokenMean(), decisions, decisions_of(decisions, rows), prompts)
            prepared = prepare(models, models.actor.model, stream, None, rows, replay=False)
            parts, length, how = prepared.micro_batches, prepared.plan.length, sampling_readout(models.config)
            sums = train(models.actor.model, parts, length, how, LikelihoodStepLoss(weights))
            total = torch.zeros(1, dtype=torch.float64, device=device) if sums is None else sums.clone()
            if sums is not None:
                sum_over(total, models.topology.dp_cp_group)
            models.actor.step()
            on_step(float(from_last(total, models.topology.pp_group)))


_ITERATION = 1_000_000
"""Training specs of this iteration are played: none that a run reaches."""


class WarmStart(NamedTuple):
    """What `warm_start` leaves behind."""

    path: Path
    """HF checkpoint of the policy."""
    losses: list[float]
    """Nats per token of each optimizer step."""


def starting_from(config: RunConfig, model: Path, output: Path, **changes) -> RunConfig:
    """The same run from another checkpoint, written elsewhere; `changes` replace further top-level settings."""
    updates = {"model": config.model.model_copy(update={"path": str(model)}), "output": str(output), **changes}
    return config.model_copy(update=updates)


def warm_start(
    config: RunConfig, topology: Topology, task: Task, output: Path, *, demonstrations: int, epochs: int,
    lr: float = 2e-3, sequences: int = 32, shape: TinyShape | None = None,
) -> WarmStart:  # fmt: skip
    """Teach a random model how actions are spelled and what the task answers, on random valid play. Collective.

    Which action is good is left to reinforcement learning.

    Args:
        config: seed, layout and limits of the episodes.
        output: `tiny` (random weights) and `warm-start` (trained ones) are written below it.
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
    models = build_actor_critic(starting_from(config, tiny, output), topology)
    models.actor.config = models.actor.config.model_copy(update={"lr": lr})
    plays = random_play(
        task.make_env, task.training_specs(_ITERATION, demonstrations), max_turns=config.rollout.max_turns,
        context_limit=models.actor.model.hf.max_positions, seed=config.seed,
    )  # fmt: skip
    losses: list[float] = []
    train_on_demonstrations(
        models, plays, epochs=epochs, minibatches=max(1, demonstrations // sequences), observations=True,
        on_step=losses.append,
    )  # fmt: skip
    return WarmStart(write_hf(models.actor.model, output / "warm-start", tiny), losses)
