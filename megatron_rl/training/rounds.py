"""What an iteration does with a scored batch: critic rounds, then actor rounds, each over shuffled minibatches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from megatron_rl.batching import split_minibatches
from megatron_rl.training.agents import Agents
from megatron_rl.training.records import ScoredBatch
from megatron_rl.training.update import update_actor, update_critic

Timed = Callable[[str], AbstractContextManager[None]]


def train_on(agents: Agents, scored: ScoredBatch, iteration: int, timed: Timed) -> dict[str, float]:
    """All optimizer steps of one iteration.

    Args:
        agents: live parts, changed.
        scored: the iteration's batch.
        iteration: seeds the shuffles, decides whether the critic still warms up alone.
        timed: context around each model's rounds, given its name.

    Returns:
        The mean of each metric over the steps that reported it, the same on every rank.
    """
    algorithm = agents.config.algorithm
    rounds = [("critic", update_critic, algorithm.critic_epochs)]
    if iteration >= algorithm.critic_warmup:
        rounds.append(("actor", update_actor, algorithm.actor_epochs))
    steps: list[dict[str, float]] = []
    for name, update, epochs in rounds:
        with timed(name), agents.at_work(name):
            for epoch in range(epochs):
                steps += [update(agents, scored, rows) for rows in _minibatches(agents, scored, iteration, epoch)]
    return _means(steps)


def _minibatches(agents: Agents, scored: ScoredBatch, iteration: int, epoch: int) -> list[np.ndarray]:
    keys = [scored.batch.trajectory_ids[row] for row in scored.rows]
    seed = agents.config.seed + iteration
    return [
        scored.rows[part]
        for part in split_minibatches(len(keys), agents.config.algorithm.minibatches, seed, epoch, keys)
    ]


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    names = {name for step in steps for name in step}
    found = {name: [step[name] for step in steps if name in step] for name in sorted(names)}
    return {name: float(np.mean(values)) for name, values in found.items()}
