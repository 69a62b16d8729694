"""On demand: the embedded engine plays an iteration's episodes on the trainer's ranks when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rl.backend import platform
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.agents import Agents
from megatron_rl.training.entrance import load_validated
from megatron_rl.training.objective.selection import episodes_to_refill
from megatron_rl.training.rollout import evaluate, record
from megatron_rl.training.sources import Delivery, Supply
from megatron_rl.training.versions import publish


class PlayedSource:
    """On-policy rollouts. See `Source`.

    Args:
        supply: configuration and what belongs to it.
        task: what is played.
        agents: whose weights play first.
    """

    def __init__(self, supply: Supply, task: Task, agents: Agents) -> None:
        self._supply, self._task = supply, task
        config = supply.config
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
        where = (config, self.engine, self._task, iteration, supply.output / "rollouts", supply.stop)
        batch, _ = load_validated(config, record(*where), supply.fingerprint, version)
        played, rounds = config.rollout.episodes, 1
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are played in their place.
        while rounds < config.algorithm.sampling_rounds and (more := episodes_to_refill(config, batch)):
            directory = record(*where, played=played, more=more)
            batch, _ = load_validated(config, directory, supply.fingerprint, version)
            played, rounds = played + more, rounds + 1
        told = {"sampling/rounds": float(rounds), "sampling/played": float(played)}
        return Delivery(batch, told if config.algorithm.dynamic_sampling else {})

    def publish(self, agents: Agents, batch: RolloutBatch | None = None) -> None:
        """See `Source`."""
        self.engine.load(publish(agents, self._supply.output / "weights"), agents.version)

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """See `Source`."""
        return {"evaluation/success": evaluate(self._supply.config, self.engine, self._task, episodes)}

    def state(self) -> dict[str, Any]:
        """See `Source`: episodes are a function of the iteration."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Source`."""

    def close(self, *, complete: bool) -> None:
        """See `Source`."""
