"""The loop's one interface to rollouts. Wherever they come from, they are read from recorded files and pass the
entrance."""

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


class RolloutSource(Protocol):
    """A context of rollouts. Every method is collective: all ranks call it, in the same order."""

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """The rollouts of this iteration, trained by weights `version`; None: there are no more.

        Raises:
            Stopped: on every rank; the run was asked to stop and this iteration has no rollouts yet.
        """
        ...

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """The rollouts that a lost run had trained the next iteration on, in place of `next_rollouts`.

        Args:
            batch: read again from the ledger's entry.
        """
        ...

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """Go on with the actor's present weights, which are `models.version`.

        Args:
            models: the live parts.
            batch: the rollouts just trained on, for a canary; None before the first update.
        """
        ...

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """`evaluation/success`, greedy success on held-out episodes; empty where there is nothing to tell.

        Args:
            episodes: how many are played.
            final: the run ends: wait for the answer.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...

    def close(self, *, complete: bool) -> None:
        """The loop is left. `complete`: the run is over, not only stopped. Not collective; may be called in a crash."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """What sources are made of."""

    config: RunConfig
    fingerprint: ModelFingerprint
    """Whose rollouts are accepted."""
    ledger: Ledger
    """What was trained on, and what a lost run had been about to."""
    stop: StopRequest

    @property
    def output(self) -> Path:
        """The run directory."""
        return Path(self.config.output)
