"""The rollout process: plays without end, writes what finishes, and takes up new weights while it plays.

    trainer's progress → room in the scheduler → episodes in flight → shards        (back-pressure, one way)
    trainer's published weights → engine, between two of its calls             (a trajectory may span versions)

It can be killed and started again at any time: what it has to know lies in the run directory. Its level of a curriculum
follows from the recorded trajectories, in their order.
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

from megatron_rl.config import RunConfig
from megatron_rl.environments.base import EpisodeSpec, Task, TextEnvironment
from megatron_rl.environments.curriculum import LEVEL
from megatron_rl.environments.levels import count_recorded, make_curriculum, training_tasks
from megatron_rl.episodes.concurrent import PlayLimits, play
from megatron_rl.episodes.episode import EpisodeLimits, Repetition
from megatron_rl.errors import CheckpointError, EngineError, EngineUnavailableError, LaunchError
from megatron_rl.rollout_worker.engines import RolloutEngine
from megatron_rl.rollout_worker.scheduler import EpisodeScheduler, ScheduledEpisode
from megatron_rl.rollout_worker.shard_writer import ShardWriter, recorded_ids
from megatron_rl.rollouts.schema import Trajectory
from megatron_rl.run_dir.exchange import Exchange, Heartbeat, Progress

WATCH_SECONDS = 0.1
BEAT_SECONDS = 1.0
_log = logging.getLogger(__name__)


class RolloutWorker:
    """Everything but the engine's start. Make it inside the event loop that runs it.

    Args:
        config: the run.
        task: what is evaluated, and trained on as `levels.training_tasks` says.
        engine: serving a published version.
        limit: most episodes ever recorded; None: until the trainer is done.
        alone: there is no trainer; play up to the limit with the weights as they are.
    """

    def __init__(
        self, config: RunConfig, task: Task, engine: RolloutEngine, limit: int | None = None, *, alone: bool = False
    ) -> None:
        self._config, self._task, self._engine, self._limit = config, task, engine, limit
        self._alone = alone
        self._exchange = Exchange(Path(config.output))
        rollout = config.rollout
        recorded = recorded_ids(self._exchange.stream)
        self._before = len(recorded)
        self._levels, self._curriculum = training_tasks(config, task), make_curriculum(config)
        self._begun_at = count_recorded(self._curriculum, self._exchange.stream) if self._curriculum else {}
        """Levels of blocks that an earlier process recorded episodes of."""
        self._scheduler = EpisodeScheduler(self._levels, self._level_of, rollout.episodes, recorded, limit)
        self._writer = ShardWriter(
            self._exchange.stream,
            engine.header(task.vocabulary.fingerprint),
            episodes=rollout.shard_episodes,
            seconds=rollout.shard_seconds,
            patience=rollout.disk_patience,
        )
        self._ahead = (rollout.staleness + 1) * rollout.episodes
        self._steady = asyncio.Lock()
        """Held while weights must not change."""
        self._aborted, self._trouble = 0, ""
        """Episodes without any use since the last that had some, and why."""
        self._asleep = False
        self._footprint: dict[str, int] = {}
        """Of the engine when it last went to sleep, for the heartbeat."""
        self._refused: tuple[int, float] | None = None
        self._evaluated = max(self._exchange.evaluations(), default=0)

    async def run(self) -> None:
        """Until the trainer is done, the limit is reached, or something fails.

        Raises:
            LaunchError: the trainer made no progress for `rollout.trainer_timeout`.
            RolloutError: shards could not be written for `rollout.disk_patience`.
        """
        playing = asyncio.create_task(self._play_all())
        works = [self._flush, self._beat]
        if self._alone:
            await self._scheduler.allow(self._limit)
        else:
            works += [self._watch, self._follow_weights]
        if self._config.rollout.colocated:
            works.append(self._sleep_when_idle)
        around = [asyncio.create_task(work()) for work in works]
        try:
            done, _ = await asyncio.wait([playing, *around], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (playing, *around):
                task.cancel()
            await asyncio.gather(playing, *around, return_exceptions=True)
        await self._writer.flush(all_of_it=True)
        self.tell("finished")

    def tell(self, state: str, problem: str = "") -> None:
        """A heartbeat out of turn."""
        self._exchange.write_heartbeat(self._heartbeat(state, problem))

    def _heartbeat(self, state: str, problem: str = "") -> Heartbeat:
        recorded = self._before + self._writer.written
        problem = problem or self._writer.problem or self._trouble
        in_flight = self._scheduler.begun - recorded
        told = {"level": self._curriculum.level, "success": self._curriculum.success} if self._curriculum else {}
        return Heartbeat(
            time.time_ns(), state, self._engine.version, recorded, problem, in_flight, **told, **self._footprint
        )

    def _level_of(self, block: int) -> int:
        return self._begun_at.get(block, self._curriculum.level) if self._curriculum else 0

    async def _play_all(self) -> None:
        """As many lanes as episodes may be in flight; returns when a limit is reached and all have ended."""
        rollout = self._config.rollout
        starts = [rollout.stagger_seconds * place / rollout.concurrency for place in range(rollout.concurrency)]
        lanes = [asyncio.create_task(self._lane(start)) for start in starts]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _lane(self, start: float) -> None:
        """One episode after another, each once there is room for it, the first after `start` seconds."""
        place: deque[ScheduledEpisode] = deque()

        async def refill() -> None:
            planned = await self._scheduler.take()
            place.extend([] if planned is None else [planned])

        async def finished(trajectory: Trajectory) -> None:
            self._look_at(trajectory)
            planned = place.popleft()
            # An environment that failed to start has left nothing to record.
            if len(trajectory.tokens):
                await self._record(trajectory, planned)
            else:
                await self._scheduler.give_back()
            await refill()

        def make_env(spec: EpisodeSpec) -> TextEnvironment:
            return self._levels[place[0].level].make_env(spec)

        await asyncio.sleep(start)
        await refill()
        await play(self._engine, make_env, _specs(place), self._limits(1), finished)

    async def _record(self, trajectory: Trajectory, planned: ScheduledEpisode) -> None:
        stamp: dict[str, int] = {"block": planned.block, "group_size": planned.group_size}
        if self._curriculum:
            stamp[LEVEL] = planned.level
        stamped = dataclasses.replace(trajectory, metadata={**trajectory.metadata, **stamp})
        if self._curriculum:
            # In the order in which the writer takes them: a later process counts them again from the files.
            self._curriculum.count([(stamped.metadata, stamped.outcome)])
        await self._writer.add(stamped)

    def _look_at(self, trajectory: Trajectory) -> None:
        """An engine that answers nobody, or an environment that never starts, must not keep the trainer waiting."""
        useless = trajectory.outcome == "aborted" or not len(trajectory.tokens)
        self._aborted = self._aborted + 1 if useless else 0
        self._trouble = str(trajectory.metadata.get("error", "")) if self._aborted else ""
        if self._aborted >= max(self._config.rollout.concurrency, self._config.rollout.episodes):
            raise EngineUnavailableError(
                "no episode can be played", found=f"{self._aborted} failed in a row, last: {self._trouble}",
                expected="an engine that answers and environments that start",
                setting="rollout.engine, rollout.engine_options, rollout.environment_options",
            )  # fmt: skip

    def _limits(self, concurrency: int) -> PlayLimits:
        rollout = self._config.rollout
        context = min(self._config.batching.token_budget, self._engine.context_limit)
        return PlayLimits(
            EpisodeLimits(
                rollout.max_turns, rollout.max_action_tokens, context, Repetition(**rollout.repetition.model_dump())
            ),
            concurrency=concurrency,
            episode_seconds=rollout.episode_timeout,
            environment_seconds=rollout.step_timeout,
            environment_threads=min(concurrency, 32),
            engine_seconds=rollout.engine_timeout or None,
            engine_retries=rollout.engine_retries,
        )

    async def _watch(self) -> None:
        """Follow the trainer; returns when it is done."""
        seen: Progress | None = None
        changed, patience = time.monotonic(), self._config.rollout.trainer_timeout
        while True:
            progress = self._exchange.progress()
            if progress is not None and progress != seen:
                seen, changed = progress, time.monotonic()
            if seen is not None and seen.done:
                return
            # Room that new weights bring is for episodes that begin under them.
            if seen is not None and self._engine.version >= seen.version:
                await self._scheduler.allow(seen.taken + self._ahead)
            if patience and time.monotonic() - changed > patience:
                raise LaunchError(
                    "the trainer makes no progress", file=self._exchange.output,
                    found=f"none for {patience:g} s, last {seen}", setting="rollout.trainer_timeout",
                )  # fmt: skip
            await asyncio.sleep(WATCH_SECONDS)

    async def _flush(self) -> None:
        while True:
            # The trainer may be waiting for the last ones: nothing else will come to fill their shard.
            all_landed = self._scheduler.begun == self._before + self._writer.written + self._writer.held
            await self._writer.flush(all_of_it=all_landed and self._scheduler.starved)
            await asyncio.sleep(WATCH_SECONDS)

    async def _beat(self) -> None:
        while True:
            idle = "asleep" if self._asleep else "waiting"
            # One moment's state and counts: the trainer gives up groups by them.
            heartbeat = self._heartbeat(idle if self._scheduler.starved else "playing")
            await asyncio.to_thread(self._exchange.write_heartbeat, heartbeat)
            await asyncio.sleep(BEAT_SECONDS)

    async def _sleep_when_idle(self) -> None:
        """Colocated: leave the device to the trainer once all that there was room for is on disk."""
        while True:
            async with self._steady:
                await self._sleep_if_idle()
            await asyncio.sleep(WATCH_SECONDS)

    async def _sleep_if_idle(self) -> None:
        written = self._before + self._writer.written
        if not self._scheduler.starved or self._scheduler.begun != written or self._due(self._engine.version):
            self._asleep = False
        elif not self._asleep and self._room_is_settled():
            if found := await self._engine.sleep():
                self._footprint = {"awake_bytes": found.awake, "asleep_bytes": found.asleep}
            self._asleep = True
            self.tell("asleep")

    def _room_is_settled(self) -> bool:
        """Whether nothing is to be played by these weights for now. Right after an update there is about to be, and the
        engine was not woken to sleep at once; it is where the trainer's newest weights were refused."""
        progress = self._exchange.progress()
        if progress is None or progress.version != self._engine.version:
            return progress is not None and progress.version > self._engine.version
        return self._scheduler.room >= progress.taken + self._ahead

    async def _follow_weights(self) -> None:
        while True:
            found = newest(self._exchange)
            if found is not None and found[0] != self._engine.version and not self._was_refused(*found):
                await self._take_up(*found)
            elif self._due(self._engine.version):
                await self._evaluate()
            await asyncio.sleep(WATCH_SECONDS)

    async def _take_up(self, version: int, weights: Path) -> None:
        try:
            async with self._steady:
                # It wakes to take them, or to serve the old ones on.
                self._asleep = False
                await self._engine.update(weights, version)
        except (EngineError, CheckpointError) as error:
            # A directory that was pruned meanwhile is not a bad one: there is a newer.
            if weights.is_dir():
                self._refused = version, weights.stat().st_mtime
                _log.warning("weight version %d is refused: %s", version, error)
                self._exchange.reject(version, str(error))
            return
        _log.info("weight version %d is served", version)

    def _was_refused(self, version: int, weights: Path) -> bool:
        """Whether this very directory was refused: a version that is published again is tried again."""
        with suppress(OSError):
            return self._refused == (version, weights.stat().st_mtime)
        return True

    def _due(self, version: int) -> bool:
        every, last = self._config.evaluate_every, self._config.iterations
        newest_due = last if version == last else version - version % every if every else 0
        return newest_due > self._evaluated

    async def _evaluate(self) -> None:
        """Greedy success on held-out episodes, all of them by one version."""
        results: list[bool] = []

        async def finished(trajectory: Trajectory) -> None:
            results.append(bool(trajectory.metadata.get("success")))

        async with self._steady:
            version = self._engine.version
            specs = self._task.evaluation_specs(self._config.evaluation_episodes)
            limits = self._limits(self._config.rollout.concurrency)
            await play(self._engine, self._task.make_env, specs, limits, finished, greedy=True)
        self._evaluated = version
        self._exchange.write_evaluation(version, sum(results) / len(results))


def newest(exchange: Exchange) -> tuple[int, Path] | None:
    """The newest published version and its directory."""
    return max(exchange.published().items(), default=None)


def _specs(place: deque[ScheduledEpisode]) -> Iterator[EpisodeSpec]:
    while place:
        yield place[0].spec
