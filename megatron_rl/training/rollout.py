"""Play and record on the trainer's ranks: recorded files are the only way from an engine to the trainer."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.engines import Generation
from megatron_rl.engines.episode_state import Repetition
from megatron_rl.engines.episodes import EpisodeSpec, play_episodes
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.rollouts.schema import Trajectory
from megatron_rl.rollouts.store import write_shard
from megatron_rl.training.state.stopping import Stopped, StopRequest


def my_share(specs: list[EpisodeSpec]) -> list[EpisodeSpec]:
    """This rank's episodes: every world-th one."""
    return specs[dist.get_rank() :: dist.get_world_size()]


def play(
    config: RunConfig, engine: LocalEngine, task: Task, specs: list[EpisodeSpec], *, greedy: bool
) -> list[Trajectory]:
    """Play episodes under the run's limits, which are the same for training and for evaluation."""
    rollout = config.rollout
    return play_episodes(
        engine,
        task.make_env,
        specs,
        max_turns=rollout.max_turns,
        max_action_tokens=rollout.max_action_tokens,
        context_limit=min(config.batching.token_budget, engine.model.config.max_position_embeddings),
        greedy=greedy,
        repetition=Repetition(**rollout.repetition.model_dump()),
    )


def record(
    config: RunConfig,
    engine: LocalEngine,
    task: Task,
    iteration: int,
    directory: Path,
    stop: StopRequest | None = None,
    *,
    played: int = 0,
    more: int | None = None,
    stamp: Mapping[str, Any] | None = None,
) -> Path:
    """Play this rank's share of an iteration and write it as one shard; returns the iteration's directory.

    Args:
        played: episodes of the iteration that earlier rounds have recorded there.
        more: episodes of this round; None: `rollout.episodes`.
        stamp: added to the metadata of each trajectory.

    Raises:
        Stopped: on every rank; the run was asked to stop and nothing of the iteration was written.
    """
    target = directory / f"iteration-{iteration:06d}"
    if dist.get_rank() == 0 and target.exists() and not played:
        # A run that resumes plays again what was recorded after its checkpoint.
        shutil.rmtree(target)
    dist.barrier()
    target.mkdir(parents=True, exist_ok=True)
    count = played + (config.rollout.episodes if more is None else more)
    specs = my_share(task.training_specs(iteration, count)[played:])
    trajectories: list[Trajectory] = []
    with contextlib.suppress(Stopped):
        trajectories = play(config, _Leaving(engine, stop) if stop else engine, task, specs, greedy=False)
    if stop is not None and stop.agreed():
        raise Stopped
    header = engine.header(task.vocabulary.fingerprint)
    # An environment that failed to start has left nothing to record.
    recorded = [replace(t, metadata={**t.metadata, **(stamp or {})}) for t in trajectories if len(t.tokens)]
    write_shard(target, header, recorded, name=f"rank-{dist.get_rank():05d}" + (f"-after-{played}" if played else ""))
    dist.barrier()
    return target


class _Leaving:
    """An engine whose rank leaves its episodes as soon as it is asked to stop."""

    def __init__(self, engine: LocalEngine, stop: StopRequest) -> None:
        self.model, self._engine, self._stop = engine.model, engine, stop

    def generate(self, *args, **options) -> list[Generation]:
        if self._stop.here:
            raise Stopped
        return self._engine.generate(*args, **options)


def success_rate(trajectories: list[Trajectory]) -> float:
    """Share of solved episodes over all ranks."""
    counts: list = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (sum(bool(t.metadata.get("success")) for t in trajectories), len(trajectories)))
    return sum(solved for solved, _ in counts) / max(sum(played for _, played in counts), 1)


def evaluate(config: RunConfig, engine: LocalEngine, task: Task, episodes: int) -> float:
    """Greedy success on episodes that are never trained on."""
    return success_rate(play(config, engine, task, my_share(task.evaluation_specs(episodes)), greedy=True))
