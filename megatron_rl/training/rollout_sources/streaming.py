"""Rollouts from a rollout process: the trainer takes finished trajectories from the stream of shards, waits when there
are too few, and publishes weights that the process picks up while it plays.

Nothing passes between the two but files (`exchange`), so either may run on other nodes and either may be started again.
Which trajectories an iteration takes is in the ledger before it trains on them: a resumed run, and a replay of the
files, takes the same ones.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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

LOOK_SECONDS = 2.0
"""How long the first rank looks before all ranks agree to look again (and whether to stop)."""
PAUSE_SECONDS = 0.1
VISIBLE_SECONDS = 60.0
"""How long a node's view of a shared file system may lag behind the first rank's."""
PUBLICATIONS = 2
"""How often one version is published before a refusal by the engine ends the run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Look:
    """What the first rank saw, for all."""

    rows: tuple[Row, ...] = ()
    rejected: str | None = None
    """Why an engine refuses the newest weights."""
    error: MegatronRLError | None = None
    metrics: Mapping[str, float] | None = None
    """Of the stream; set where the look is not to be repeated."""


class StreamingRolloutSource:
    """See `Source`. The run's weights are published when it is made.

    Args:
        context: configuration and what belongs to it.
        models: the live parts.

    Raises:
        ConfigError: a run that starts afresh finds another one's rollouts.
    """

    def __init__(self, context: SourceContext, models: ActorCritic) -> None:
        self._context, self._agents, self._config = context, models, context.config
        self._exchange = Exchange(context.output)
        self._first = dist.get_rank() == 0
        self._batch: RolloutBatch | None = None
        self._publications = self._extra = 0
        self._refuse_leftovers()
        entries = ledger.read_entries(context.ledger.path)
        self._counts = {entry.iteration: sum(len(rows) for _, rows in entry.shards) for entry in entries}
        """Trajectories of each iteration in the ledger."""
        taken = (place for entry in entries for place in entry.rows())
        skip = self._config.rollout.on_bad_record == "quarantine"
        self._index = TrajectoryBuffer(context.output, self._exchange.stream, taken, skip_damaged=skip)
        self._told = set(self._exchange.evaluations())
        self._publish()
        own = self._first and not self._config.rollout.external
        self._signs = HeartbeatMonitor(self._exchange, self._config.rollout)
        self._child = WorkerProcess(self._config, self._exchange) if own else None

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """See `Source`.

        Raises:
            LaunchError: no rollout process is alive.
            EngineVersionError: an engine refused the newest weights repeatedly.
        """
        started, algorithm = time.monotonic(), self._config.algorithm
        look = self._wait(lambda: self._look_for_rows(self._config.rollout.episodes, version))
        rows, metrics, rounds = list(look.rows), {**look.metrics}, 1
        if not rows:
            return None
        batch = self._read(iteration, version, rows)
        # Dynamic sampling drops groups of equal rewards when the batch is scored: others are taken in their place.
        while rounds < algorithm.sampling_rounds and (more := episodes_to_refill(self._config, batch)):
            self._ask_for(more, version)
            look = self._wait(lambda more=more: self._look_for_rows(more, version))
            rows, metrics, rounds = [*rows, *look.rows], metrics | look.metrics, rounds + 1
            batch = self._read(iteration, version, rows)
        self._counts[iteration], self._extra = len(rows), 0
        told = {"sampling/rounds": float(rounds), "sampling/played": float(len(rows))}
        told = told if algorithm.dynamic_sampling else {}
        waited = {"stream/wait_seconds": time.monotonic() - started}
        return IterationRollouts(batch, {**metrics, **staleness_metrics(batch, version), **told, **waited})

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """See `Source`: the index gives them to nobody else."""
        if self._config.rollout.colocated:
            # The engine takes up the present weights on that device all the same.
            self._wait(self._look_for_the_device)
        return IterationRollouts(batch)

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """See `Source`."""
        self._batch, self._publications = batch, 0
        self._publish()

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """See `Source`: what the rollout process found earlier comes with a rollouts; only the last is waited for."""
        version = self._agents.version
        self._signs.expect()
        while final:
            look = self._agree(lambda: self._look_for_evaluation(version))
            if look.metrics is not None:
                return look.metrics
        return {}

    def state(self) -> dict[str, Any]:
        """See `Source`: all of it is in the ledger."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Source`."""

    def close(self, *, complete: bool) -> None:
        """See `Source`. An external rollout process ends when the run is complete, and waits when it was stopped."""
        if self._first and complete:
            self._exchange.write_progress(Progress(self._agents.version, self._room_made, done=True))
        if self._child is not None:
            self._child.close(wait=complete)

    def _wait(self, look: Callable[[], _Look | None]) -> _Look:
        """The first look that finds what it looks for, or that there will never be."""
        self._signs.expect()
        while True:
            found = self._agree(look)
            if found.rejected is not None:
                self._publish_again(found.rejected)
            if found.metrics is not None:
                return found
            if self._context.stop.agreed():
                raise Stopped

    def _ask_for(self, more: int, version: int) -> None:
        """Give room for further episodes before this iteration's weights are there."""
        self._extra += more
        if self._first:
            self._exchange.write_progress(Progress(version, self._room_made))

    @property
    def _room_made(self) -> int:
        """Trajectories of completed iterations, those given up, and those asked for beyond an iteration's own."""
        done = sum(count for iteration, count in self._counts.items() if iteration < self._agents.version)
        return done + self._index.expired + self._extra

    def _publish(self) -> None:
        self._publications += 1
        canary = None if self._batch is None else make_canary(self._agents, self._batch)
        if self._first:
            self._exchange.forget_rejection(self._agents.version)
        publish_weights(self._agents, self._exchange.weights, canary=canary)
        if self._first:
            self._exchange.write_progress(Progress(self._agents.version, self._room_made))

    def _publish_again(self, reason: str) -> None:
        version = self._agents.version
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

    def _look_for_rows(self, count: int, version: int) -> _Look | None:
        # Before the scan: what is on disk by then is all of what it counts.
        heartbeat, _ = self._exchange.heartbeat()
        given_up = self._index.expired
        self._index.scan()
        if self._config.rollout.colocated and not self._device_is_free(version):
            return self._look_for_trouble("the engine still holds the device")
        rows = self._take(count, version)
        if not rows and self._is_stuck(heartbeat):
            self._index.give_up_partial()
        if self._index.expired > given_up:
            # Others may be played in their place, now.
            self._exchange.write_progress(Progress(version, self._room_made))
        if not rows and self._signs.finished:
            # Its last shards may have appeared after the scan and before its last word.
            self._index.scan()
            rows = self._take(count, version) or self._take(1, version, all_left=True)
            return _Look(tuple(rows), metrics=self._metrics())
        if rows:
            return _Look(tuple(rows), metrics=self._metrics())
        return self._look_for_trouble(f"{len(self._index.waiting)} of {count} trajectories are there")

    def _look_for_the_device(self) -> _Look | None:
        if self._device_is_free(self._agents.version):
            return _Look(metrics={})
        return self._look_for_trouble("the engine still holds the device")

    def _look_for_trouble(self, meanwhile: str) -> _Look | None:
        if (reason := self._exchange.rejection(self._agents.version)) is not None:
            return _Look(rejected=reason)
        self._check_life(meanwhile)
        return None

    def _is_stuck(self, heartbeat: Heartbeat | None) -> bool:
        """Whether groups that lack a member will lack it for ever: the rollout process has no room and nothing in
        flight, and we know all that it recorded. An environment that failed to start leaves such groups."""
        if heartbeat is None or not self._config.rollout.complete_groups:
            return False
        idle = heartbeat.state in ("waiting", "asleep") and heartbeat.in_flight == 0
        return idle and heartbeat.recorded == self._index.found

    def _device_is_free(self, version: int) -> bool:
        """Whether the engine has gone to sleep after all that we found, and under these weights."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or heartbeat.state not in ("asleep", "finished"):
            return False
        return heartbeat.version == version and heartbeat.recorded >= self._index.found

    def _take(self, count: int, version: int, *, all_left: bool = False) -> list[Row]:
        rollout = self._config.rollout
        whole = rollout.complete_groups
        how = {"whole_groups": whole, "drop": rollout.stragglers == "drop"}
        if all_left:
            count = max(count, sum(row.newest <= version for row in self._index.waiting))
        return self._index.take(count, version, rollout.staleness, **how)

    def _look_for_evaluation(self, version: int) -> _Look | None:
        if version in self._exchange.evaluations():
            return _Look(metrics=self._news())
        try:
            self._check_life(f"the evaluation of version {version} is not there")
        except MegatronRLError as error:
            _log.warning("the last evaluation is missing: %s", error)
            return _Look(metrics={})
        return _Look(metrics={}) if self._signs.finished else None

    def _check_life(self, missing: str) -> None:
        if self._child is not None and self._child.revive():
            self._signs.begin()
        self._signs.check(missing)

    def _metrics(self) -> dict[str, float]:
        index = self._index
        return {
            "stream/waiting": float(len(index.waiting)),
            "stream/expired": float(index.expired),
            "stream/bytes_per_token": index.bytes / max(index.tokens, 1),
            "stream/trainer_peak_bytes": float(peak_bytes()),
            **self._news(),
            **self._curriculum(),
            **self._engine_memory(),
        }

    def _engine_memory(self) -> dict[str, float]:
        """What the engine held when it last left the device, and after that; nothing where it does not leave."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or not heartbeat.awake_bytes:
            return {}
        return {
            "stream/engine_awake_bytes": float(heartbeat.awake_bytes),
            "stream/engine_asleep_bytes": float(heartbeat.asleep_bytes),
        }

    def _curriculum(self) -> dict[str, float]:
        """What the rollout process plays now."""
        heartbeat, _ = self._exchange.heartbeat()
        if heartbeat is None or heartbeat.level < 0:
            return {}
        return curriculum_metrics(heartbeat.level, heartbeat.success)

    def _news(self) -> dict[str, float]:
        """The newest evaluation that was not told yet."""
        found = self._exchange.evaluations()
        new = sorted(set(found) - self._told)
        self._told |= set(found)
        return {"evaluation/success": found[new[-1]], "evaluation/version": float(new[-1])} if new else {}

    def _agree(self, look: Callable[[], _Look | None]) -> _Look:
        """What the first rank sees, on every rank; an empty look after LOOK_SECONDS without anything to see.

        Raises:
            MegatronRLError: on every rank, what looking raised.
        """
        message = [_patiently(look) if self._first else None]
        dist.broadcast_object_list(message, src=0)
        if message[0].error is not None:
            raise message[0].error
        return message[0]

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


def staleness_metrics(batch: RolloutBatch, version: int) -> dict[str, float]:
    """`stream/staleness_*`: versions between sampling and training, over sampled tokens.

    Returns:
        `mean`, `max`, the `share` of each age from 0 to the greatest, and `spanning`: the share of trajectories that
        more than one version sampled.
    """
    ages = version - batch.version[batch.action_mask]
    if not len(ages):
        return {}
    counts = np.bincount(np.maximum(ages, 0)) / len(ages)
    spans = [np.ptp(part[mask]) > 0 for part, mask in _by_trajectory(batch) if mask.any()]
    return {
        "stream/staleness_mean": float(ages.mean()),
        "stream/staleness_max": float(ages.max()),
        "stream/spanning": float(np.mean(spans)),
        **{f"stream/staleness_share/{age}": float(share) for age, share in enumerate(counts)},
    }


def _by_trajectory(batch: RolloutBatch):
    inner = batch.offsets[1:-1]
    return zip(np.split(batch.version, inner), np.split(batch.action_mask, inner), strict=True)


def _wait_for_files(files: set[Path]) -> None:
    """Until this node sees them, or for VISIBLE_SECONDS: reading tells what is missing then."""
    end = time.monotonic() + VISIBLE_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)


def _patiently(look: Callable[[], _Look | None]) -> _Look:
    end = time.monotonic() + LOOK_SECONDS
    try:
        while (found := look()) is None:
            if time.monotonic() > end:
                return _Look()
            time.sleep(PAUSE_SECONDS)
        return found
    except MegatronRLError as error:
        return _Look(error=error)
