"""The rollout process: plays until the trainer is done, writes finished episodes, and loads new weights while it plays.

    trainer's progress → room in the scheduler → episodes in flight → shards     (back-pressure, in one direction)
    trainer's published weights → engine, between two of its calls               (a trajectory may span versions)

It can be killed and started again at any time: all of its state follows from the run directory, its level of a
curriculum from the recorded trajectories, in their order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import RunConfig
from megatron_rl.environments.base import EpisodeSpec, Task, TextEnvironment
from megatron_rl.environments.curriculum import LEVEL
from megatron_rl.environments.levels import count_recorded, make_curriculum, training_tasks
from megatron_rl.episodes.concurrent import PlayLimits, play
from megatron_rl.errors import CheckpointError, EngineError, EngineUnavailableError, LaunchError
from megatron_rl.rollout_worker.engines import RolloutEngine
from megatron_rl.rollout_worker.scheduler import EpisodeScheduler, ScheduledEpisode
from megatron_rl.rollout_worker.shard_writer import ShardWriter, recorded_ids
from megatron_rl.rollouts.schema import Trajectory
from megatron_rl.run_dir.exchange import Exchange, Heartbeat, Progress

if TYPE_CHECKING:
    from megatron_rl.engines.vllm.replica import Footprint

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
_log = logging.getLogger(__name__)


class RolloutWorker:
    """Plays, records, evaluates and loads weights with an engine that runs. Construct it in the event loop of `run`.

    Args:
        config: the run.
        task: what is evaluated; what is trained on follows from it (`levels.training_tasks`).
        engine: serving a published version.
        limit: most episodes ever recorded; None: until the trainer is done.
        alone: there is no trainer; play up to the limit, which must be given, with the weights as they are.
    """

    def __init__(
        self, config: RunConfig, task: Task, engine: RolloutEngine, limit: int | None = None, *, alone: bool = False
    ) -> None:
        self._config, self._task, self._engine, self._limit = config, task, engine, limit
        self._alone = alone
        self._exchange = Exchange(Path(config.output))
        rollout = config.rollout
        recorded = recorded_ids(self._exchange.stream)
        self._recorded_before = len(recorded)
        self._levels, self._curriculum = training_tasks(config, task), make_curriculum(config)
        self._level_of_begun = count_recorded(self._curriculum, self._exchange.stream) if self._curriculum else {}
        """Block → level, of blocks that an earlier process recorded episodes of."""
        self._scheduler = EpisodeScheduler(self._levels, self._level_of, rollout.episodes, recorded, limit)
        self._writer = ShardWriter(
            self._exchange.stream,
            engine.header(task.vocabulary.fingerprint),
            episodes=rollout.shard_episodes,
            seconds=rollout.shard_seconds,
            patience=rollout.disk_patience,
        )
        self._ahead = (rollout.staleness + 1) * rollout.episodes
        """Episodes that may be begun beyond those the trainer has taken."""
        self._weights_lock = asyncio.Lock()
        """Held while weights must not change."""
        self._failures, self._last_failure = 0, ""
        """Unusable episodes since the last usable one, and why the last of them failed."""
        self._asleep = False
        self._footprint: Footprint | None = None
        """Of the engine when it last went to sleep, for the heartbeat."""
        self._refused: tuple[int, float] | None = None
        """Version and modification time of the directory that the engine refused last."""
        self._evaluated = max(self._exchange.evaluations(), default=0)
        """Newest version that was evaluated."""

    async def run(self) -> None:
        """Run until the trainer is done, the limit is reached, or something fails.

        Raises:
            LaunchError: the trainer made no progress for `rollout.trainer_timeout`.
            RolloutError: shards could not be written for `rollout.disk_patience`, or too many environment calls hang.
            EngineUnavailableError: as many episodes failed in a row as are in flight.
            EngineError: a colocated engine did not go to sleep.
        """
        playing = asyncio.create_task(self._play_all())
        services = [self._flush, self._write_heartbeats]
        if self._alone:
            assert self._limit is not None, "playing alone needs a limit"
            await self._scheduler.allow(self._limit)
        else:
            services += [self._follow_trainer, self._follow_weights]
        if self._config.rollout.colocated:
            services.append(self._sleep_when_idle)
        beside = [asyncio.create_task(service()) for service in services]
        try:
            done, _ = await asyncio.wait([playing, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (playing, *beside):
                task.cancel()
            await asyncio.gather(playing, *beside, return_exceptions=True)
        await self._writer.flush(force=True)
        self._exchange.write_heartbeat(self._heartbeat("finished"))

    @property
    def _recorded(self) -> int:
        """Trajectories on disk, those of earlier processes included."""
        return self._recorded_before + self._writer.written

    def _heartbeat(self, state: str) -> Heartbeat:
        heartbeat = Heartbeat(
            time.time_ns(),
            state,
            self._engine.version,
            self._recorded,
            self._writer.problem or self._last_failure,
            in_flight=self._scheduler.begun - self._recorded,
        )
        if (curriculum := self._curriculum) is not None:
            heartbeat = dataclasses.replace(heartbeat, level=curriculum.level, success=curriculum.success)
        if (found := self._footprint) is not None:
            heartbeat = dataclasses.replace(heartbeat, awake_bytes=found.awake, asleep_bytes=found.asleep)
        return heartbeat

    def _level_of(self, block: int) -> int:
        return self._level_of_begun.get(block, self._curriculum.level) if self._curriculum else 0

    async def _play_all(self) -> None:
        """Run a slot for each episode that may be in flight; returns when the limit is reached and all have ended."""
        rollout = self._config.rollout
        starts = [rollout.stagger_seconds * i / rollout.concurrency for i in range(rollout.concurrency)]
        slots = [asyncio.create_task(self._play_slot(start)) for start in starts]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _play_slot(self, start: float) -> None:
        """Play one episode after another, each once there is room for it, the first after `start` seconds."""
        current: deque[ScheduledEpisode] = deque()

        async def refill() -> None:
            scheduled = await self._scheduler.take()
            current.extend([] if scheduled is None else [scheduled])

        async def finished(trajectory: Trajectory) -> None:
            self._count_failures(trajectory)
            scheduled = current.popleft()
            # An environment that failed to start has left nothing to record.
            if len(trajectory.tokens):
                await self._record(trajectory, scheduled)
            else:
                await self._scheduler.give_back()
            await refill()

        def make_env(spec: EpisodeSpec) -> TextEnvironment:
            return self._levels[current[0].level].make_env(spec)

        await asyncio.sleep(start)
        await refill()
        await play(self._engine, make_env, _specs(current), self._limits(1), finished)

    async def _record(self, trajectory: Trajectory, scheduled: ScheduledEpisode) -> None:
        stamp: dict[str, int] = {"block": scheduled.block, "group_size": scheduled.group_size}
        if self._curriculum:
            stamp[LEVEL] = scheduled.level
        stamped = dataclasses.replace(trajectory, metadata={**trajectory.metadata, **stamp})
        if self._curriculum:
            # In the order in which the writer takes them: a restarted process counts them again from the files.
            self._curriculum.count([(stamped.metadata, stamped.outcome)])
        await self._writer.add(stamped)

    def _count_failures(self, trajectory: Trajectory) -> None:
        """Fail where an engine answers no call or no environment starts: else the trainer would wait for ever."""
        unusable = trajectory.outcome == "aborted" or not len(trajectory.tokens)
        self._failures = self._failures + 1 if unusable else 0
        self._last_failure = str(trajectory.metadata.get("error", "")) if self._failures else ""
        if self._failures >= max(self._config.rollout.concurrency, self._config.rollout.episodes):
            raise EngineUnavailableError(
                "no episode can be played", found=f"{self._failures} failed in a row, last: {self._last_failure}",
                expected="an engine that answers and environments that start",
                setting="rollout.engine, rollout.engine_options, rollout.environment_options",
            )  # fmt: skip

    def _limits(self, concurrency: int) -> PlayLimits:
        context_limit = min(self._config.batching.token_budget, self._engine.context_limit)
        return PlayLimits.of(self._config.rollout, context_limit, concurrency)

    async def _follow_trainer(self) -> None:
        """Give the scheduler room as the trainer progresses; returns when the trainer is done."""
        seen: Progress | None = None
        changed, limit = time.monotonic(), self._config.rollout.trainer_timeout
        while True:
            progress = self._exchange.progress()
            if progress is not None and progress != seen:
                seen, changed = progress, time.monotonic()
            if seen is not None and seen.done:
                return
            # Room that comes with a version is for episodes that begin under that version.
            if seen is not None and self._engine.version >= seen.version:
                await self._scheduler.allow(seen.taken + self._ahead)
            if limit and time.monotonic() - changed > limit:
                raise LaunchError(
                    "the trainer makes no progress", file=self._exchange.output,
                    found=f"none for {limit:g} s, last {seen}", setting="rollout.trainer_timeout",
                )  # fmt: skip
            await asyncio.sleep(POLL_SECONDS)

    async def _flush(self) -> None:
        while True:
            # The trainer may be waiting for the last episodes: no others will come to fill their shard.
            all_ended = self._scheduler.begun == self._recorded + self._writer.buffered
            await self._writer.flush(force=all_ended and self._scheduler.starved)
            await asyncio.sleep(POLL_SECONDS)

    async def _write_heartbeats(self) -> None:
        while True:
            idle = "asleep" if self._asleep else "waiting"
            # State and counts of the same moment: the trainer decides by them which groups can no longer be completed.
            heartbeat = self._heartbeat(idle if self._scheduler.starved else "playing")
            await asyncio.to_thread(self._exchange.write_heartbeat, heartbeat)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _sleep_when_idle(self) -> None:
        """Colocated: release the device for the trainer once all episodes that there was room for are on disk."""
        while True:
            async with self._weights_lock:
                await self._sleep_if_idle()
            await asyncio.sleep(POLL_SECONDS)

    async def _sleep_if_idle(self) -> None:
        idle = self._scheduler.starved and self._scheduler.begun == self._recorded
        if not idle or self._evaluation_due(self._engine.version):
            self._asleep = False
        elif not self._asleep and self._room_is_final():
            if found := await self._engine.sleep():
                self._footprint = found
            self._asleep = True
            self._exchange.write_heartbeat(self._heartbeat("asleep"))

    def _room_is_final(self) -> bool:
        """Whether the engine's version will get no more room, as far as the trainer's progress says.

        Right after an update the room of the new version is not yet in the scheduler, and an engine that slept then
        would be woken at once. An engine that refused the trainer's newest version gets no room for its old one.
        """
        progress = self._exchange.progress()
        if progress is None or progress.version != self._engine.version:
            return progress is not None and progress.version > self._engine.version
        return self._scheduler.room >= progress.taken + self._ahead

    async def _follow_weights(self) -> None:
        while True:
            found = newest_weights(self._exchange)
            if found is not None and found[0] != self._engine.version and not self._was_refused(*found):
                await self._update_engine(*found)
            elif self._evaluation_due(self._engine.version):
                await self._evaluate()
            await asyncio.sleep(POLL_SECONDS)

    async def _update_engine(self, version: int, weights: Path) -> None:
        try:
            async with self._weights_lock:
                # An update wakes the engine, whether it takes the weights or refuses them.
                self._asleep = False
                await self._engine.update(weights, version)
        except (EngineError, CheckpointError) as error:
            # A directory that was pruned meanwhile is not refused: there is a newer one.
            if weights.is_dir():
                self._refused = version, weights.stat().st_mtime
                _log.warning("the engine refuses weight version %d: %s", version, error)
                self._exchange.reject(version, str(error))
            return
        _log.info("the engine serves weight version %d", version)

    def _was_refused(self, version: int, weights: Path) -> bool:
        """Whether this directory was refused, by its time: a version that is published again is tried again."""
        with suppress(OSError):
            return self._refused == (version, weights.stat().st_mtime)
        return True

    def _evaluation_due(self, version: int) -> bool:
        every, last = self._config.evaluate_every, self._config.iterations
        newest_due = last if version == last else version - version % every if every else 0
        return newest_due > self._evaluated

    async def _evaluate(self) -> None:
        """Greedy success on held-out episodes, all of them by one version."""
        results: list[bool] = []

        async def finished(trajectory: Trajectory) -> None:
            results.append(bool(trajectory.metadata.get("success")))

        async with self._weights_lock:
            version = self._engine.version
            specs = self._task.evaluation_specs(self._config.evaluation_episodes)
            limits = self._limits(self._config.rollout.concurrency)
            await play(self._engine, self._task.make_env, specs, limits, finished, greedy=True)
        self._evaluated = version
        self._exchange.write_evaluation(version, sum(results) / len(results))


def newest_weights(exchange: Exchange) -> tuple[int, Path] | None:
    """The newest published version and its directory; None: there is none yet."""
    return max(exchange.published().items(), default=None)


def _specs(current: deque[ScheduledEpisode]) -> Iterator[EpisodeSpec]:
    while current:
        yield current[0].spec
