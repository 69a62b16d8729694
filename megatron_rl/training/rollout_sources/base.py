"""The trainer's one interface to rollouts. Wherever they come from, they are read from recorded files and validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import RunConfig
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch
from megatron_rl.run_dir.ledger import Ledger
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.stopping import StopRequest


@dataclass(frozen=True)
class IterationRollouts:
    """The rollouts of one iteration, the same on every rank."""

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)
    not_started: int = 0
    """Episodes that were to be played and left nothing to record."""


class RolloutSource(Protocol):
    """Gives each iteration its rollouts. All methods but `close` are collective: ranks call them in the same order."""

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """The rollouts of this iteration, trained by weights `version`; None: there are no more.

        Raises:
            Stopped: on every rank; the run was asked to stop and this iteration has no rollouts yet.
        """
        ...

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """The rollouts that a lost run trained this iteration on, in place of `next_rollouts`.

        Args:
            batch: read again from the ledger's entry.
        """
        ...

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """Play on with the actor's present weights, which are version `models.version`.

        Args:
            models: the live parts.
            batch: the rollouts just trained on, for a canary; None before the first update.
        """
        ...

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """`evaluation/success`, greedy success on held-out episodes; empty where there is no result.

        Args:
            episodes: how many are played.
            final: the run ends: wait for the result.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...

    def close(self, *, complete: bool) -> None:
        """The run ends here. `complete`: its last iteration is done. Not collective; also called after an error."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """What every source is made from."""

    config: RunConfig
    fingerprint: ModelFingerprint
    """Whose rollouts are accepted."""
    ledger: Ledger
    """What was trained on, and what iterations that no checkpoint saw were trained on."""
    stop: StopRequest

    @property
    def output(self) -> Path:
        """The run directory."""
        return Path(self.config.output)
