"""Where an iteration's rollouts come from. Whatever the source, they are read from recorded files and pass the
entrance; the loop sees one interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.config import RunConfig
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch
from megatron_rl.training.agents import Agents
from megatron_rl.training.state.ledger import Ledger
from megatron_rl.training.state.stopping import StopRequest

if TYPE_CHECKING:
    from megatron_rl.engines.tasks import Task


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

    def again(self, batch: RolloutBatch) -> Delivery:
        """The rollouts that a lost run had trained the next iteration on, in place of `next`.

        Args:
            batch: read again from the ledger's entry.
        """
        ...

    def publish(self, agents: Agents, batch: RolloutBatch | None = None) -> None:
        """Go on with the actor's present weights, which are `agents.version`.

        Args:
            agents: the live parts.
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
class Supply:
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


def make_source(supply: Supply, task: Task | None, agents: Agents) -> Source:
    """The source that the configuration asks for, with the present weights published.

    Args:
        supply: configuration and what belongs to it.
        task: what is played; None where nothing is.
        agents: the live parts.
    """
    # Each source is imported where it is used: recorded runs need no engine, and no engine's libraries.
    if supply.config.rollout.recorded:
        from megatron_rl.training.recorded import RecordedSource

        return RecordedSource(supply)
    if supply.config.rollout.has_process:
        from megatron_rl.training.levels import training_tasks
        from megatron_rl.training.stream import StreamSource

        # The rollout process would refuse the same, later, and with its words in a log.
        training_tasks(supply.config, task)
        return StreamSource(supply, agents)
    from megatron_rl.training.played import PlayedSource

    return PlayedSource(supply, task, agents)
