"""Where an iteration's rollouts come from. Whatever the source, they are read from recorded files and pass the
entrance; the loop sees one interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from megatron_rl.backend import platform
from megatron_rl.config import RunConfig
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch
from megatron_rl.training.rollout import evaluate, load_validated, record
from megatron_rl.training.stopping import StopRequest


@dataclass(frozen=True)
class Delivery:
    """The rollouts of one iteration, the same on every rank."""

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    """A supply of rollouts. Every method is collective: all ranks call it, in the same order."""

    def next(self, iteration: int, version: int) -> Delivery | None:
        """The rollouts of this iteration, trained by weights `version`; None: there are no more.

        Raises:
            Stopped: on every rank; the run was asked to stop and this iteration has no rollouts yet.
        """
        ...

    def publish(self, weights: Path, version: int) -> None:
        """Go on with these weights, an HF directory."""
        ...

    def evaluate(self, episodes: int) -> float | None:
        """Greedy success on held-out episodes; None: the source cannot play."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


class PlayedSource:
    """The embedded engine plays an iteration's episodes when they are asked for: on-policy, on the trainer's ranks.

    Args:
        config: the run.
        task: what is played.
        fingerprint: whose rollouts are accepted.
        weights: HF directory to start with.
        version: its version.
        stop: asked between the turns of episodes.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        fingerprint: ModelFingerprint,
        weights: Path,
        version: int,
        stop: StopRequest,
    ) -> None:
        self._config, self._task, self._fingerprint, self._stop = config, task, fingerprint, stop
        self._directory = Path(config.output) / "rollouts"
        self.engine = LocalEngine(
            weights,
            dtype=platform.dtype(config.rollout.engine_dtype or config.model.dtype),
            temperature=config.rollout.temperature,
            version=version,
            device=platform.device(),
        )

    def next(self, iteration: int, version: int) -> Delivery | None:
        """See `Source`. A resumed run plays the same episodes again."""
        seed = np.random.SeedSequence([self._config.seed, iteration, dist.get_rank()]).generate_state(1)[0]
        self.engine.reseed(int(seed))
        directory = record(self._config, self.engine, self._task, iteration, self._directory, self._stop)
        batch, _ = load_validated(self._config, directory, self._fingerprint, version)
        return Delivery(batch)

    def publish(self, weights: Path, version: int) -> None:
        """See `Source`."""
        self.engine.load(weights, version)

    def evaluate(self, episodes: int) -> float | None:
        """See `Source`."""
        return evaluate(self._config, self.engine, self._task, episodes)

    def state(self) -> dict[str, Any]:
        """See `Source`: episodes are a function of the iteration."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Source`."""
