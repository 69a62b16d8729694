"""Play, record, read back, validate: the recorded files are the only way from an engine to the trainer."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.engines import Generation
from megatron_rl.engines.episodes import EpisodeSpec, play_episodes
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.errors import MegatronRLError, RolloutError
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, Trajectory
from megatron_rl.rollouts.store import read_batch, select_rows, write_shard
from megatron_rl.rollouts.validate import ValidationReport, validate
from megatron_rl.training.stopping import Stopped, StopRequest


def my_share(specs: list[EpisodeSpec]) -> list[EpisodeSpec]:
    """This rank's episodes: every world-th one."""
    return specs[dist.get_rank() :: dist.get_world_size()]


def play(
    config: RunConfig, engine: LocalEngine, task: Task, specs: list[EpisodeSpec], *, greedy: bool
) -> list[Trajectory]:
    """Play episodes under the run's limits."""
    rollout = config.rollout
    return play_episodes(
        engine,
        task.make_env,
        specs,
        max_turns=rollout.max_turns,
        max_action_tokens=rollout.max_action_tokens,
        context_limit=min(config.batching.token_budget, engine.model.config.max_position_embeddings),
        greedy=greedy,
    )


def record(
    config: RunConfig,
    engine: LocalEngine,
    task: Task,
    iteration: int,
    directory: Path,
    stop: StopRequest | None = None,
) -> Path:
    """Play this rank's share of an iteration and write it as one shard; returns the iteration's directory.

    Raises:
        Stopped: on every rank; the run was asked to stop and nothing of the iteration was written.
    """
    target = directory / f"iteration-{iteration:06d}"
    if dist.get_rank() == 0 and target.exists():
        # A run that resumes plays again what was recorded after its checkpoint.
        shutil.rmtree(target)
    dist.barrier()
    target.mkdir(parents=True, exist_ok=True)
    specs = my_share(task.training_specs(iteration, config.rollout.episodes))
    trajectories: list[Trajectory] = []
    with contextlib.suppress(Stopped):
        trajectories = play(config, _Leaving(engine, stop) if stop else engine, task, specs, greedy=False)
    if stop is not None and stop.agreed():
        raise Stopped
    header = engine.header(task.vocabulary.fingerprint)
    write_shard(target, header, trajectories, name=f"rank-{dist.get_rank():05d}")
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


def load_validated(
    config: RunConfig, directory: Path, expected: ModelFingerprint, version: int
) -> tuple[RolloutBatch, list[ValidationReport]]:
    """Map an iteration's shards and pass them through the entrance. Ranks check disjoint rows and share the verdict.

    Raises:
        RolloutError, RouteError: the same error on every rank, the first in row order.
    """
    damaged: list[RolloutError] | None = [] if config.rollout.on_bad_record == "quarantine" else None
    batch = read_batch(directory, verify_checksums=dist.get_rank() == 0, refused=damaged)
    mine = np.arange(dist.get_rank(), len(batch), dist.get_world_size())
    verdict: tuple = ([], None, None)
    try:
        checked = validate(
            select_rows(batch, mine),
            expected=expected,
            replay=config.replay.enabled,
            current_version=version,
            temperature=config.rollout.temperature,
            missing_boundary=config.algorithm.missing_boundary,
            on_bad_record=config.rollout.on_bad_record,
            quarantine_dir=directory / "quarantine",
            min_route_coverage=config.replay.min_coverage,
            already_refused=(damaged or ()) if dist.get_rank() == 0 else (),
        )
        verdict = (mine[checked.kept].tolist(), None, checked.report)
    except MegatronRLError as error:
        verdict = ([], error, None)
    verdicts: list = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    for _, error, _ in verdicts:
        if error is not None:
            raise error
    kept = np.array(sorted(row for rows, _, _ in verdicts for row in rows), np.int64)
    if not len(kept):
        raise RolloutError("no trajectory of this iteration passed validation", file=directory)
    return select_rows(batch, kept), [report for _, _, report in verdicts]


def success_rate(trajectories: list[Trajectory]) -> float:
    """Share of solved episodes over all ranks."""
    counts: list = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (sum(bool(t.metadata.get("success")) for t in trajectories), len(trajectories)))
    return sum(solved for solved, _ in counts) / max(sum(played for _, played in counts), 1)


def evaluate(config: RunConfig, engine: LocalEngine, task: Task, episodes: int) -> float:
    """Greedy success on episodes that are never trained on."""
    return success_rate(play(config, engine, task, my_share(task.evaluation_specs(episodes)), greedy=True))
