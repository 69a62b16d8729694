"""Rollouts from a rollout worker: the trainer takes finished trajectories from a stream of shards, waits when there are
too few, and publishes weights that the worker loads while it plays.

Nothing passes between the two but files (`run_dir.exchange`), so either may run on other nodes and either may be
started again. Which trajectories an iteration takes is in the ledger before it trains on them: a resumed run, and a
replay of the files, takes the same ones.

Files are polled by rank 0 alone, which broadcasts what it saw: shared file systems show ranks different things.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.metrics import staleness_metrics
from megatron_rl.algorithm.selection import episodes_to_refill
from megatron_rl.backend import platform
from megatron_rl.environments.levels import curriculum_metrics
from megatron_rl.errors import ConfigError, EngineVersionError, MegatronRLError
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import shard_paths
from megatron_rl.run_dir import ledger
from megatron_rl.run_dir.exchange import Exchange, Heartbeat, Progress
from megatron_rl.run_dir.ledger import Entry
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.rollout_sources.base import IterationRollouts, SourceContext
from megatron_rl.training.rollout_sources.heartbeat_monitor import HeartbeatMonitor
from megatron_rl.training.rollout_sources.trajectory_buffer import Row, TrajectoryBuffer
from megatron_rl.training.rollout_sources.validation import validated
from megatron_rl.training.rollout_sources.worker_process import WorkerProcess
from megatron_rl.training.stopping import Stopped
from megatron_rl.training.weights import make_canary, publish_weights

POLL_SECONDS = 2.0
"""How long rank 0 polls before all ranks ask each other whether to stop."""
POLL_INTERVAL = 0.1
VISIBLE_SECONDS = 60.0
"""How long a node's view of a shared file system may lag behind rank 0's."""
PUBLICATIONS = 2
"""How often one version is published before a refusal by the engine ends the run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Poll:
    """What rank 0 saw in the run directory, for all ranks. Without any field set: nothing yet, poll again."""

    done: bool = False
    """What was waited for is there, or will never be; `rows` and `metrics` count."""
    rows: tuple[Row, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rejected: str | None = None
    """Why an engine refuses the newest weights."""
    error: MegatronRLError | None = None
    """To be raised on every rank."""


class StreamingRolloutSource:
    """Takes the trajectories that a rollout worker streams to disk. The present weights are published on construction.

    Args:
        context: configuration and what belongs to it.
        models: the live parts.

    Raises:
        ConfigError: a run that starts afresh finds another one's rollouts.
    """

    def __init__(self, context: SourceContext, models: ActorCritic) -> None:
        self._context, self._models, self._config = context, models, context.config
        self._exchange = Exchange(context.output)
        self._is_first_rank = dist.get_rank() == 0
        self._trained_batch: RolloutBatch | None = None
        """Of the last iteration, for a canary."""
        self._publications = 0
        """Of the present version."""
        self._requested = 0
        """Trajectories asked for beyond `rollout.episodes`, in this iteration."""
        self._refuse_leftovers()
        entries = ledger.read_entries(context.ledger.path)
        self._consumed = {entry.iteration: sum(len(rows) for _, rows in entry.shards) for entry in entries}
        """Trajectories of each iteration in the ledger."""
        taken = (row for entry in entries for row in entry.rows())
        skip = self._config.rollout.on_bad_record == "quarantine"
        self._buffer = TrajectoryBuffer(context.output, self._exchange.stream, taken, skip_damaged=skip)
        self._reported = set(self._exchange.evaluations())
        """Versions whose evaluation is in the metrics already."""
        self._publish()
        own = self._is_first_rank and not self._config.rollout.external
        self._monitor = HeartbeatMonitor(self._exchange, self._config.rollout)
        self._worker = WorkerProcess(self._config, self._exchange) if own else None

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """Wait for `rollout.episodes` trajectories of the stream; None: the worker has finished and none is left.

        Raises:
            Stopped: on every rank; the run was asked to stop meanwhile.
            LaunchError: no rollout worker is alive.
            EngineVersionError: an engine refused the newest weights repeatedly.
        """
        started, algorithm = time.monotonic(), self._config.algorithm
        poll = self._wait_for(partial(self._poll_rows, self._config.rollout.episodes, version))
        rows, metrics, rounds = list(poll.rows), dict(poll.metrics), 1
        if not rows:
            return None
        batch = self._read(iteration, version, rows)
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are taken in their place.
        while rounds < algorithm.sampling_rounds and (more := episodes_to_refill(self._config, batch)):
            self._request_more(more, version)
            poll = self._wait_for(partial(self._poll_rows, more, version))
            rows, metrics, rounds = [*rows, *poll.rows], {**metrics, **poll.metrics}, rounds + 1
            batch = self._read(iteration, version, rows)
        self._consumed[iteration], self._requested = len(rows), 0
        metrics |= _staleness(batch, version)
        if algorithm.dynamic_sampling:
            metrics |= {"sampling/rounds": float(rounds), "sampling/played": float(len(rows))}
        metrics["stream/wait_seconds"] = time.monotonic() - started
        return IterationRollouts(batch, metrics)

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """The rollouts as they are: the ledger has them, so the buffer gives them to no other iteration."""
        if self._config.rollout.colocated:
            # The engine loads the present weights on the shared device all the same.
            self._wait_for(self._poll_device)
        return IterationRollouts(batch)

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """Write the weights, with a canary scored on `batch`, and room for the episodes of another iteration."""
        self._trained_batch, self._publications = batch, 0
        self._publish()

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """The worker's evaluation of the last version. Earlier ones come with the metrics of later rollouts."""
        version = self._models.version
        self._monitor.start_waiting()
        while final:
            poll = self._poll_together(partial(self._poll_evaluation, version))
            if poll.done:
                return poll.metrics
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing: which trajectories were taken is in the ledger."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self, *, complete: bool) -> None:
        """End the worker that was started here. An external one ends when the run is complete, and waits otherwise."""
        if self._is_first_rank and complete:
            self._exchange.write_progress(Progress(self._models.version, self._trajectories_taken, done=True))
        if self._worker is not None:
            self._worker.close(wait=complete)

    def _wait_for(self, poll: Callable[[], _Poll | None]) -> _Poll:
        """Poll until done. Publishes refused weights again. Collective.

        Raises:
            Stopped: on every rank.
        """
        self._monitor.start_waiting()
        while True:
            seen = self._poll_together(poll)
            if seen.rejected is not None:
                self._publish_again(seen.rejected)
            if seen.done:
                return seen
            if self._context.stop.agreed():
                raise Stopped

    def _request_more(self, more: int, version: int) -> None:
        """Let the worker begin further episodes before the next version."""
        self._requested += more
        if self._is_first_rank:
            self._exchange.write_progress(Progress(version, self._trajectories_taken))

    @property
    def _trajectories_taken(self) -> int:
        """Trajectories of completed iterations, discarded ones, and those requested beyond an iteration's own."""
        done = sum(count for iteration, count in self._consumed.items() if iteration < self._models.version)
        return done + self._buffer.expired + self._requested

    def _publish(self) -> None:
        self._publications += 1
        canary = None if self._trained_batch is None else make_canary(self._models, self._trained_batch)
        if self._is_first_rank:
            self._exchange.forget_rejection(self._models.version)
        publish_weights(self._models, self._exchange.weights, canary=canary)
        if self._is_first_rank:
            self._exchange.write_progress(Progress(self._models.version, self._trajectories_taken))

    def _publish_again(self, reason: str) -> None:
        version = self._models.version
        if self._publications >= PUBLICATIONS:
            raise EngineVersionError(
                f"an engine refuses weight version {version}, published {self._publications} times",
                file=self._exchange.weights, found=reason, expected="weights that score like the trainer's",
            )  # fmt: skip
        _log.warning("weight version %d was refused and is published again: %s", version, reason)
        self._publish()

    def _read(self, iteration: int, version: int, rows: Sequence[Row]) -> RolloutBatch:
        entry = Entry(iteration, version, tuple((row.file, (row.row,)) for row in rows))
        _wait_for_files({self._context.output / row.file for row in rows})
        batch = ledger.reread(entry, self._context.output)
        side = self._exchange.stream.parent
        return validated(self._config, batch, self._context.fingerprint, version, side)[0]

    def _poll_rows(self, count: int, version: int) -> _Poll | None:
        # Read before the scan: then all trajectories it counts are found.
        heartbeat, _ = self._exchange.heartbeat()
        discarded = self._buffer.expired
        self._buffer.scan()
        if self._config.rollout.colocated and not self._engine_sleeps(version):
            return self._poll_faults("the engine still holds the device")
        rows = self._take(count, version)
        if not rows and self._groups_stay_incomplete(heartbeat):
            self._buffer.discard_incomplete_groups()
        if self._buffer.expired > discarded:
            # Other episodes may be played in their place, now.
            self._exchange.write_progress(Progress(version, self._trajectories_taken))
        if not rows and self._monitor.finished:
            # Its last shards may have appeared after the scan and before its last heartbeat.
            self._buffer.scan()
            rows = self._take(count, version) or self._take(1, version, all_left=True)
            return _Poll(done=True, rows=tuple(rows), metrics=self._stream_metrics())
        if rows:
            return _Poll(done=True, rows=tuple(rows), metrics=self._stream_metrics())
        return self._poll_faults(f"{len(self._buffer.waiting)} of {count} trajectories are there")

    def _poll_device(self) -> _Poll | None:
        if self._engine_sleeps(self._models.version):
            return _Poll(done=True)
        return self._poll_faults("the engine still holds the device")

    def _poll_faults(self, missing: str) -> _Poll | None:
        """Whether an engine refuses the weights; raises where no worker is alive. `missing`: what is waited for."""
        if (reason := self._exchange.rejection(self._models.version)) is not None:
            return _Poll(rejected=reason)
        self._check_worker(missing)
        return None

    def _groups_stay_incomplete(self, heartbeat: Heartbeat | None) -> bool:
        """Whether groups that lack a member will never be complete: the worker has no room and no episode in flight,
        and all that it recorded is found. An environment that failed to start leaves such groups."""
        if heartbeat is None or not self._config.rollout.complete_groups:
            return False
        idle = heartbeat.state in ("waiting", "asleep") and heartbeat.in_flight == 0
        return idle and heartbeat.recorded == self._buffer.found

    def _engine_sleeps(self, version: int) -> bool:
        """Whether the engine sleeps, after recording all that is found, and under these weights."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or heartbeat.state not in ("asleep", "finished"):
            return False
        return heartbeat.version == version and heartbeat.recorded >= self._buffer.found

    def _take(self, count: int, version: int, *, all_left: bool = False) -> list[Row]:
        rollout = self._config.rollout
        if all_left:
            count = max(count, sum(row.newest <= version for row in self._buffer.waiting))
        whole, drop = rollout.complete_groups, rollout.stragglers == "drop"
        return self._buffer.take(count, version, rollout.staleness, whole_groups=whole, drop=drop)

    def _poll_evaluation(self, version: int) -> _Poll | None:
        if version in self._exchange.evaluations():
            return _Poll(done=True, metrics=self._new_evaluation())
        try:
            self._check_worker(f"the evaluation of version {version} is not there")
        except MegatronRLError as error:
            _log.warning("the last evaluation is missing: %s", error)
            return _Poll(done=True)
        return _Poll(done=True) if self._monitor.finished else None

    def _check_worker(self, missing: str) -> None:
        if self._worker is not None and self._worker.restart_if_dead():
            self._monitor.expect_start()
        self._monitor.check(missing)

    def _stream_metrics(self) -> dict[str, float]:
        buffer = self._buffer
        return {
            "stream/waiting": float(len(buffer.waiting)),
            "stream/expired": float(buffer.expired),
            "stream/bytes_per_token": buffer.bytes / max(buffer.tokens, 1),
            "stream/trainer_peak_bytes": float(peak_bytes()),
            **self._new_evaluation(),
            **self._curriculum_metrics(),
            **self._memory_metrics(),
        }

    def _memory_metrics(self) -> dict[str, float]:
        """Memory of the engine before and after it last slept; nothing where it does not sleep."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or not heartbeat.awake_bytes:
            return {}
        return {
            "stream/engine_awake_bytes": float(heartbeat.awake_bytes),
            "stream/engine_asleep_bytes": float(heartbeat.asleep_bytes),
        }

    def _curriculum_metrics(self) -> dict[str, float]:
        """Level and success of the episodes that the worker begins now."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or heartbeat.level < 0:
            return {}
        return curriculum_metrics(heartbeat.level, heartbeat.success)

    def _new_evaluation(self) -> dict[str, float]:
        """The newest evaluation that is in no metrics yet."""
        evaluations = self._exchange.evaluations()
        new = sorted(set(evaluations) - self._reported)
        self._reported |= set(evaluations)
        return {"evaluation/success": evaluations[new[-1]], "evaluation/version": float(new[-1])} if new else {}

    def _poll_together(self, poll: Callable[[], _Poll | None]) -> _Poll:
        """What rank 0 sees within POLL_SECONDS, on every rank. Collective.

        Raises:
            MegatronRLError: on every rank, what polling raised.
        """
        message = [_poll_for_a_while(poll) if self._is_first_rank else _Poll()]
        dist.broadcast_object_list(message, src=0)
        (seen,) = message
        if seen.error is not None:
            raise seen.error
        return seen

    def _refuse_leftovers(self) -> None:
        if not self._config.checkpoint.resume and shard_paths(self._exchange.stream, folders="*"):
            raise ConfigError(
                "a run that starts afresh finds the recorded rollouts of an earlier one", file=self._exchange.stream,
                setting="output=ANOTHER_DIRECTORY, or checkpoint.resume=true to continue",
            )  # fmt: skip


def peak_bytes() -> int:
    """Most memory this process held so far: of its GPU where it has one, else of the host."""
    if platform.on_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _staleness(batch: RolloutBatch, version: int) -> dict[str, float]:
    """`stream/staleness_*` over all sampled tokens, and `stream/spanning`: the share of trajectories that more than one
    version sampled."""
    versions = torch.from_numpy(batch.version[batch.action_mask])
    if not len(versions):
        return {}
    metrics = staleness_metrics(
        versions, version, prefix="stream/staleness_", share="stream/staleness_share/", oldest=None
    )
    metrics["stream/staleness_max"] = float(version - int(versions.min()))
    inner = batch.offsets[1:-1]
    parts = zip(np.split(batch.version, inner), np.split(batch.action_mask, inner), strict=True)
    spans = [np.ptp(sampled[mask]) > 0 for sampled, mask in parts if mask.any()]
    return metrics | {"stream/spanning": float(np.mean(spans))}


def _wait_for_files(files: set[Path]) -> None:
    """Until this node sees them, or for VISIBLE_SECONDS: reading them raises then."""
    end = time.monotonic() + VISIBLE_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)


def _poll_for_a_while(poll: Callable[[], _Poll | None]) -> _Poll:
    """The first answer within POLL_SECONDS, else an empty one; an error is an answer."""
    end = time.monotonic() + POLL_SECONDS
    try:
        while (seen := poll()) is None:
            if time.monotonic() > end:
                return _Poll()
            time.sleep(POLL_INTERVAL)
        return seen
    except MegatronRLError as error:
        return _Poll(error=error)
