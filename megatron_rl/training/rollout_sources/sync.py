"""On demand: the embedded engine plays an iteration's episodes on the trainer's ranks when they are asked for.

Recorded files are the only way from an engine to the trainer, here too.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.algorithm.selection import episodes_to_refill
from megatron_rl.backend import platform
from megatron_rl.config import RunConfig
from megatron_rl.engines import Generation
from megatron_rl.engines.local import LocalEngine
from megatron_rl.environments.base import EpisodeSpec, Task
from megatron_rl.environments.curriculum import LEVEL
from megatron_rl.environments.levels import curriculum_metrics, make_curriculum, training_tasks
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes
from megatron_rl.rollouts.schema import RolloutBatch, Trajectory
from megatron_rl.rollouts.store import write_shard
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.rollout_sources.base import IterationRollouts, SourceContext
from megatron_rl.training.rollout_sources.validation import load_validated
from megatron_rl.training.stopping import Stopped, StopRequest
from megatron_rl.training.weights import publish_weights


class SyncRolloutSource:
    """On-policy rollouts. See `Source`.

    Args:
        context: configuration and what belongs to it.
        task: what is evaluated, and trained on as `levels.training_tasks` says.
        models: whose weights play first.
    """

    def __init__(self, context: SourceContext, task: Task, models: ActorCritic) -> None:
        self._context, self._task = context, task
        config = context.config
        self._levels, self._curriculum = training_tasks(config, task), make_curriculum(config)
        self.engine = LocalEngine(
            publish_weights(models, context.output / "weights"),
            dtype=platform.dtype(config.rollout.engine_dtype or config.model.dtype),
            temperature=config.rollout.temperature,
            version=models.version,
            device=platform.device(),
        )

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """See `Source`. A resumed run plays the same episodes again."""
        config, context = self._context.config, self._context
        # No rank in it: an episode samples the same tokens whichever rank plays it.
        self.engine.reseed(int(np.random.SeedSequence([config.seed, iteration]).generate_state(1)[0]))
        level = self._curriculum.level if self._curriculum else 0
        where = (config, self.engine, self._levels[level], iteration, context.output / "rollouts", context.stop)
        stamp = {LEVEL: level} if self._curriculum else {}
        batch, _ = load_validated(config, record(*where, stamp=stamp), context.fingerprint, version)
        played, rounds = config.rollout.episodes, 1
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are played in their place.
        while rounds < config.algorithm.sampling_rounds and (more := episodes_to_refill(config, batch)):
            directory = record(*where, played=played, more=more, stamp=stamp)
            batch, _ = load_validated(config, directory, context.fingerprint, version)
            played, rounds = played + more, rounds + 1
        told = {"sampling/rounds": float(rounds), "sampling/played": float(played)}
        told = told if config.algorithm.dynamic_sampling else {}
        return IterationRollouts(batch, told | self._count(batch))

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """See `Source`."""
        return IterationRollouts(batch, self._count(batch))

    def _count(self, batch: RolloutBatch) -> dict[str, float]:
        """Let the curriculum see an iteration's results, the same on every rank and in any layout."""
        if self._curriculum is None:
            return {}
        level, results = self._curriculum.level, zip(batch.trajectory_ids, batch.metadata, batch.outcome, strict=True)
        self._curriculum.count(tuple(result) for _, *result in sorted(results, key=lambda result: result[0]))
        return curriculum_metrics(level, self._curriculum.success)

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """See `Source`."""
        self.engine.load(publish_weights(models, self._context.output / "weights"), models.version)

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """See `Source`."""
        return {"evaluation/success": evaluate(self._context.config, self.engine, self._task, episodes)}

    def state(self) -> dict[str, Any]:
        """See `Source`: episodes are a function of iteration and level."""
        return {"curriculum": self._curriculum.state()} if self._curriculum else {}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Source`."""
        if self._curriculum and "curriculum" in state:
            self._curriculum.restore(state["curriculum"])

    def close(self, *, complete: bool) -> None:
        """See `Source`."""


def my_share(specs: list[EpisodeSpec]) -> list[EpisodeSpec]:
    """This rank's episodes: every world-th one."""
    return specs[dist.get_rank() :: dist.get_world_size()]


def play(
    config: RunConfig, engine: LocalEngine, task: Task, specs: list[EpisodeSpec], *, greedy: bool
) -> list[Trajectory]:
    """Play episodes under the run's limits, which are the same for training and for evaluation."""
    context_limit = min(config.batching.token_budget, engine.model.config.max_position_embeddings)
    limits = EpisodeLimits.of(config.rollout, context_limit)
    return play_episodes(engine, task.make_env, specs, limits, greedy=greedy)


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
