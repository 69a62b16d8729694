"""Where an iteration's rollouts come from: played by the trainer, streamed from a rollout process, or recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.training.actor_critic import Agents
from megatron_rl.training.rollout_sources.base import Source, Supply

if TYPE_CHECKING:
    from megatron_rl.environments.base import Task


def make_source(supply: Supply, task: Task | None, agents: Agents) -> Source:
    """The source that the configuration asks for, with the present weights published.

    Args:
        supply: configuration and what belongs to it.
        task: what is played; None where nothing is.
        agents: the live parts.
    """
    # Each source is imported where it is used: recorded runs need no engine, and no engine's libraries.
    if supply.config.rollout.recorded:
        from megatron_rl.training.rollout_sources.recorded import RecordedSource

        return RecordedSource(supply)
    if supply.config.rollout.has_process:
        from megatron_rl.environments.levels import training_tasks
        from megatron_rl.training.rollout_sources.streaming import StreamSource

        # The rollout process would refuse the same, later, and with its words in a log.
        training_tasks(supply.config, task)
        return StreamSource(supply, agents)
    from megatron_rl.training.rollout_sources.sync import PlayedSource

    return PlayedSource(supply, task, agents)
