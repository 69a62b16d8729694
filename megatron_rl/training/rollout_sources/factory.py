"""Which source a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.rollout_sources.base import RolloutSource, SourceContext

if TYPE_CHECKING:
    from megatron_rl.environments.base import Task


def make_rollout_source(context: SourceContext, task: Task | None, models: ActorCritic) -> RolloutSource:
    """The source that the configuration asks for, with the present weights published.

    Args:
        context: configuration and what belongs to it.
        task: what is played; None where nothing is.
        models: the live parts.
    """
    # Each source is imported where it is used: recorded runs need no engine, and no engine's libraries.
    if context.config.rollout.recorded:
        from megatron_rl.training.rollout_sources.recorded import RecordedRolloutSource

        return RecordedRolloutSource(context)
    assert task is not None, "only recorded rollouts are trained on without a task"
    if context.config.rollout.has_process:
        from megatron_rl.environments.levels import training_tasks
        from megatron_rl.training.rollout_sources.streaming import StreamingRolloutSource

        # The rollout worker would refuse the same levels, but later, and in its log.
        training_tasks(context.config, task)
        return StreamingRolloutSource(context, models)
    from megatron_rl.training.rollout_sources.sync import SyncRolloutSource

    return SyncRolloutSource(context, task, models)
