"""On demand: the embedded engine plays an iteration's episodes on the trainer's ranks when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rl.backend import platform
from megatron_rl.engines.curriculum import LEVEL
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.agents import Agents
from megatron_rl.training.entrance import load_validated
from megatron_rl.training.levels import curriculum_metrics, make_curriculum, training_tasks
from megatron_rl.training.objective.selection import episodes_to_refill
from megatron_rl.training.rollout import evaluate, record
from megatron_rl.training.supply import Delivery, Supply
from megatron_rl.training.versions import publish


class PlayedSource:
    """On-policy rollouts. See `Source`.

    Args:
        supply: configuration and what belongs to it.
        task: what is evaluated, and trained on as `levels.training_tasks` says.
        agents: whose weights play first.
    """

    def __init__(self, supply: Supply, task: Task, agents: Agents) -> None:
        self._supply, self._task = supply, task
        config = supply.config
        self._levels, self._curriculum = training_tasks(config, task), make_curriculum(config)
        self.engine = LocalEngine(
            publish(agents, supply.output / "weights"),
            dtype=platform.dtype(config.rollout.engine_dtype or config.model.dtype),
            temperature=config.rollout.temperature,
            version=agents.version,
            device=platform.device(),
        )

    def next(self, iteration: int, version: int) -> Delivery | None:
        """See `Source`. A resumed run plays the same episodes again."""
        config, supply = self._supply.config, self._supply
        # No rank in it: an episode samples the same tokens whichever rank plays it.
        self.engine.reseed(int(np.random.SeedSequence([config.seed, iteration]).generate_state(1)[0]))
        level = self._curriculum.level if self._curriculum else 0
        where = (config, self.engine, self._levels[level], iteration, supply.output / "rollouts", supply.stop)
        stamp = {LEVEL: level} if self._curriculum else {}
        batch, _ = load_validated(config, record(*where, stamp=stamp), supply.fingerprint, version)
        played, rounds = config.rollout.episodes, 1
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are played in their place.
        while rounds < config.algorithm.sampling_rounds and (more := episodes_to_refill(config, batch)):
            directory = record(*where, played=played, more=more, stamp=stamp)
            batch, _ = load_validated(config, directory, supply.fingerprint, version)
            played, rounds = played + more, rounds + 1
        told = {"sampling/rounds": float(rounds), "sampling/played": float(played)}
        told = told if config.algorithm.dynamic_sampling else {}
        return Delivery(batch, told | self._count(batch))

    def again(self, batch: RolloutBatch) -> Delivery:
        """See `Source`."""
        return Delivery(batch, self._count(batch))

    def _count(self, batch: RolloutBatch) -> dict[str, float]:
        """Let the curriculum see an iteration's results, the same on every rank and in any layout."""
        if self._curriculum is None:
            return {}
        level, results = self._curriculum.level, zip(batch.trajectory_ids, batch.metadata, batch.outcome, strict=True)
        self._curriculum.count(tuple(result) for _, *result in sorted(results, key=lambda result: result[0]))
        return curriculum_metrics(level, self._curriculum.success)

    def publish(self, agents: Agents, batch: RolloutBatch | None = None) -> None:
        """See `Source`."""
        self.engine.load(publish(agents, self._supply.output / "weights"), agents.version)

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """See `Source`."""
        return {"evaluation/success": evaluate(self._supply.config, self.engine, self._task, episodes)}

    def state(self) -> dict[str, Any]:
        """See `Source`: episodes are a function of iteration and level."""
        return {"curriculum": self._curriculum.state()} if self._curriculum else {}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Source`."""
        if self._curriculum and "curriculum" in state:
            self._curriculum.restore(state["curriculum"])

    def close(self, *, complete: bool) -> None:
        """See `Source`."""
