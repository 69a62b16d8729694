"""Rollouts on demand: the embedded engine plays an iteration's episodes on the trainer's ranks.

`SyncRolloutSource` is the trainer's source. Below it, the functions that play this rank's share of episodes, record
them and measure success; evaluation from the command line and from examples uses them too. Recorded files are the only
way from an engine to the trainer, here as elsewhere.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.algorithm.selection import episodes_to_refill
from megatron_rl.backend import platform
from megatron_rl.config import RunConfig
from megatron_rl.engines import Generation, TokenEngine
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
    """Plays an iteration's episodes with the weights that train on them.

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
        """Play `rollout.episodes` episodes. A resumed run plays the same ones again."""
        config, context = self._context.config, self._context
        # No rank in it: an episode samples the same tokens whichever rank plays it.
        self.engine.reseed(int(np.random.SeedSequence([config.seed, iteration]).generate_state(1)[0]))
        level = self._curriculum.level if self._curriculum else 0
        stamp = {LEVEL: level} if self._curriculum else {}
        play_and_record = partial(
            record, config, self.engine, self._levels[level], iteration, context.output / "rollouts", context.stop,
            stamp=stamp,
        )  # fmt: skip
        batch, reports = load_validated(config, play_and_record(), context.fingerprint, version)
        played, rounds = config.rollout.episodes, 1
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are played in their place.
        while rounds < config.algorithm.sampling_rounds and (more := episodes_to_refill(config, batch)):
            directory = play_and_record(played=played, more=more)
            batch, reports = load_validated(config, directory, context.fingerprint, version)
            played, rounds = played + more, rounds + 1
        sampling = {"sampling/rounds": float(rounds), "sampling/played": float(played)}
        metrics = (sampling if config.algorithm.dynamic_sampling else {}) | self._count(batch)
        return IterationRollouts(batch, metrics, not_started=played - sum(report.read for report in reports))

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """The rollouts as they are; the curriculum counts them as if they had been played now."""
        return IterationRollouts(batch, self._count(batch))

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """Write the weights and load them into the engine."""
        self.engine.load(publish_weights(models, self._context.output / "weights"), models.version)

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """Play `episodes` held-out episodes greedily."""
        return {"evaluation/success": evaluate(self._context.config, self.engine, self._task, episodes)}

    def state(self) -> dict[str, Any]:
        """The curriculum's level: episodes are a function of iteration and level."""
        return {"curriculum": self._curriculum.state()} if self._curriculum else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the curriculum's level."""
        if self._curriculum and "curriculum" in state:
            self._curriculum.restore(state["curriculum"])

    def close(self, *, complete: bool) -> None:
        """Nothing to close."""

    def _count(self, batch: RolloutBatch) -> dict[str, float]:
        """Have the curriculum count an iteration's results, in an order that no layout changes."""
        if self._curriculum is None:
            return {}
        level, order = self._curriculum.level, sorted(range(len(batch)), key=lambda row: batch.trajectory_ids[row])
        self._curriculum.count((batch.metadata[row], batch.outcome[row]) for row in order)
        return curriculum_metrics(level, self._curriculum.success)


def my_share(specs: list[EpisodeSpec]) -> list[EpisodeSpec]:
    """This rank's episodes: every world-th one."""
    return specs[dist.get_rank() :: dist.get_world_size()]


def play(
    config: RunConfig, engine: LocalEngine, task: Task, specs: list[EpisodeSpec], *, greedy: bool,
    stop: StopRequest | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Play episodes under the run's limits, which are the same for training and for evaluation. Not collective.

    Raises:
        Stopped: this rank was asked to stop.
    """
    context_limit = min(config.batching.token_budget, engine.model.config.max_position_embeddings)
    limits = EpisodeLimits.of(config.rollout, context_limit)
    player: TokenEngine = engine if stop is None else _StoppableEngine(engine, stop)
    return play_episodes(player, task.make_env, specs, limits, greedy=greedy)


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
        trajectories = play(config, engine, task, specs, greedy=False, stop=stop)
    if stop is not None and stop.agreed():
        raise Stopped
    header = engine.header(task.vocabulary.fingerprint)
    # An environment that failed to start has left nothing to record.
    recorded = [replace(t, metadata={**t.metadata, **(stamp or {})}) for t in trajectories if len(t.tokens)]
    write_shard(target, header, recorded, name=f"rank-{dist.get_rank():05d}" + (f"-after-{played}" if played else ""))
    dist.barrier()
    return target


class _StoppableEngine:
    """An engine that raises `Stopped` instead of generating once this rank was asked to stop."""

    def __init__(self, engine: LocalEngine, stop: StopRequest) -> None:
        self._engine, self._stop = engine, stop

    def generate(self, *args: Any, **options: Any) -> list[Generation]:
        if self._stop.here:
            raise Stopped
        return self._engine.generate(*args, **options)


def success_rate(trajectories: list[Trajectory]) -> float:
    """Share of solved episodes over all ranks. Collective."""
    counts = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(counts, (sum(bool(t.metadata.get("success")) for t in trajectories), len(trajectories)))
    return sum(solved for solved, _ in counts) / max(sum(played for _, played in counts), 1)


def evaluate(config: RunConfig, engine: LocalEngine, task: Task, episodes: int) -> float:
    """Greedy success on episodes that are never trained on. Collective."""
    return success_rate(play(config, engine, task, my_share(task.evaluation_specs(episodes)), greedy=True))
