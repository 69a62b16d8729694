"""What an iteration does with a scored batch: critic rounds, then actor rounds, each over shuffled minibatches.

The steps of an iteration are a list that depends on configuration, batch and iteration only, so a run that stopped
between two of them goes on at the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from megatron_rl.batching import split_minibatches
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.records import ScoredBatch
from megatron_rl.training.update import update_actor, update_critic

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step to do."""

    model: str
    """`critic` or `actor`."""
    rows: np.ndarray
    """int64: its trajectories."""


def planned_steps(models: ActorCritic, scored: ScoredBatch, iteration: int) -> list[OptimizerStep]:
    """The optimizer steps of an iteration, in order: none of a critic that there is not, none of the actor while the
    critic warms up alone."""
    algorithm = models.config.algorithm
    steps = _epochs(models, scored, iteration, "critic", algorithm.critic.epochs) if models.critic is not None else []
    if not models.controllers.critic_only(iteration):
        steps += _epochs(models, scored, iteration, "actor", algorithm.epochs)
    return steps


def train_epochs(
    models: ActorCritic,
    scored: ScoredBatch,
    iteration: int,
    timed: Timed,
    *,
    done: Sequence[dict[str, float]] = (),
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[dict[str, float]], bool]:
    """Do the steps of an iteration that are not done yet.

    Args:
        models: live parts, changed.
        scored: the iteration's batch.
        iteration: seeds the shuffles, decides whether the critic still warms up alone.
        timed: context around each model's rounds, given its name.
        done: metrics of the steps done before, the first of the plan.
        stop: asked before every step, on every rank with the same answer; True: do no more.

    Returns:
        Metrics of all steps done, those of `done` first, and whether the iteration is complete.
    """
    plan = planned_steps(models, scored, iteration)
    metrics = list(done)
    for model, steps in groupby(plan[len(metrics) :], key=lambda step: step.model):
        update = {"critic": update_critic, "actor": update_actor}[model]
        with timed(model), models.on_device(model):
            for step in steps:
                if stop():
                    return metrics, False
                metrics.append(update(models, scored, step.rows))
    return metrics, True


def means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that reported it."""
    names = {name for step in steps for name in step}
    found = {name: [step[name] for step in steps if name in step] for name in sorted(names)}
    return {name: float(np.mean(values)) for name, values in found.items()}


def _epochs(models: ActorCritic, scored: ScoredBatch, iteration: int, model: str, epochs: int) -> list[OptimizerStep]:
    return [
        OptimizerStep(model, rows) for epoch in range(epochs) for rows in _minibatches(models, scored, iteration, epoch)
    ]


def _minibatches(models: ActorCritic, scored: ScoredBatch, iteration: int, epoch: int) -> list[np.ndarray]:
    """Rows of each optimizer step; whole groups where the loss joins the responses of a group."""
    count, seed = models.config.algorithm.minibatches, models.config.seed + iteration
    if models.config.algorithm.policy.clock == "group":
        names = np.asarray(scored.batch.group_ids)[scored.rows]
        groups = np.unique(names).tolist()
        parts = split_minibatches(len(groups), count, seed, epoch, groups)
        return [scored.rows[np.isin(names, np.asarray(groups)[part])] for part in parts]
    keys = [scored.batch.trajectory_ids[row] for row in scored.rows]
    return [scored.rows[part] for part in split_minibatches(len(keys), count, seed, epoch, keys)]
