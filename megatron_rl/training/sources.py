"""Where an iteration's rollouts come from: played by the trainer, streamed from a rollout process, or recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.training.agents import Agents
from megatron_rl.training.supply import Source, Supply

if TYPE_CHECKING:
    from megatron_rl.engines.tasks import Task


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
