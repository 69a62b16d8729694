"""Plays many text environments at once with an engine that takes calls one by one.

Invariants, beyond those of every record (`episode`):

* What an episode records depends on its spec, its environment and the engine's generations, never on other episodes.
* At most `concurrency` episodes are started and not yet taken by `on_finished`, so a slow `on_finished` slows the start
  of new ones. No episode waits for another's engine call, environment or `on_finished`, except for a free slot.
* Every engine call carries the exact tokens of the record so far: generated ids are never turned into text and back.
* An environment that raises, hangs, or returns what cannot be recorded ends its own episode only, with the reason in
  `metadata["error"]`. A failed engine call is repeated; when its retries are used up the episode is `aborted`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.engines import AsyncTokenEngine, Generation
from megatron_rl.environments.base import EpisodeSpec, TextEnvironment, close_environment
from megatron_rl.episodes.env_threads import CallResult, CallThreads
from megatron_rl.episodes.episode import Episode, EpisodeLimits, check_generation
from megatron_rl.episodes.lockstep import MakeEnvironment
from megatron_rl.errors import ConfigError, EngineError, EngineUnavailableError
from megatron_rl.rollouts.schema import Trajectory

OnFinished = Callable[[Trajectory], Awaitable[None]]
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class PlayLimits:
    """How many episodes, how long, and how many retries. Times are seconds of the wall clock; None: no limit.

    Fields that a user sets have the names of `RolloutConfig`.

    Raises:
        ConfigError: a number is too small.
    """

    episode: EpisodeLimits
    """What ends an episode early."""
    concurrency: int = 128
    """Episodes at a time."""
    episode_timeout: float | None = None
    """From the start of an episode on. One that takes longer is `timeout`, a truncation, as soon as no environment call
    is running."""
    step_timeout: float | None = 60.0
    """One call of an environment: its construction with `reset`, `step`, or `close`; None: as long as the episode."""
    engine_timeout: float | None = None
    """One engine call; one that takes longer is made again."""
    engine_retries: int = 3
    """How often a failed engine call is made again before its episode is aborted."""
    engine_pause: float = 1.0
    """Pause before the first repeated call; it doubles each time, with a random factor between 0.5 and 1.5."""
    environment_threads: int = 32
    """Environment calls at a time."""
    max_stuck_environments: int = 64
    """Environment calls that never returned. More are an error, since each keeps a thread."""

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("engine_retries", 0), ("engine_pause", 0), ("environment_threads", 1),
                            ("max_stuck_environments", 0)):  # fmt: skip
            if (found := getattr(self, name)) < least:
                raise ConfigError(
                    "limit of concurrent episodes", field=name, found=found, expected=f">= {least}",
                    setting=_setting(name),
                )  # fmt: skip
        for name in ("episode_timeout", "step_timeout", "engine_timeout"):
            found = getattr(self, name)
            if found is not None and not found > 0:
                raise ConfigError(
                    "time limit", field=name, found=found, expected="> 0, or None", setting=_setting(name)
                )

    @classmethod
    def of(cls, rollout: RolloutConfig, context_limit: int, concurrency: int) -> PlayLimits:
        """The limits that a configuration sets.

        Args:
            context_limit: see `EpisodeLimits.of`.
            concurrency: episodes at a time, where it is not all of `rollout.concurrency`.
        """
        return cls(
            EpisodeLimits.of(rollout, context_limit),
            concurrency=concurrency,
            episode_timeout=rollout.episode_timeout,
            step_timeout=rollout.step_timeout,
            engine_timeout=rollout.engine_timeout or None,
            engine_retries=rollout.engine_retries,
            environment_threads=min(concurrency, 32),
        )


def _setting(name: str) -> str | None:
    return f"rollout.{name}" if name in RolloutConfig.model_fields else None


async def play(
    engine: AsyncTokenEngine,
    make_env: MakeEnvironment,
    specs: Iterable[EpisodeSpec] | AsyncIterable[EpisodeSpec],
    limits: PlayLimits,
    on_finished: OnFinished,
    *,
    greedy: bool = False,
) -> None:
    """Play episodes until `specs` ends, which may be never; cancel the task to stop at once.

    Args:
        engine: called once per turn, and again for the rest of an action that a weight update interrupted.
        make_env: builds the environment of one episode. Called once at a time, but from changing threads.
        specs: episodes to play. The next one is requested whenever a slot is free, one request at a time; the iterator
            may choose by what has finished and, if asynchronous, wait until there is something to play.
        limits: concurrency, time limits and retries.
        on_finished: awaited with each trajectory as it finishes, for several episodes at a time. The slot of an episode
            is free for the next one when it returns.
        greedy: see the engine; greedy trajectories are for evaluation only.

    Raises:
        RolloutError: more environment calls hang than `max_stuck_environments`.
        Exception: what `specs`, `on_finished` or the engine raised, `EngineError` excepted; other episodes are
            cancelled.
    """
    threads = CallThreads(limits.environment_threads, limits.max_stuck_environments)
    runner = _Runner(engine, make_env, limits, threads, greedy)
    source = _SpecSource(specs)
    slots = [asyncio.create_task(runner.run(source, on_finished)) for _ in range(limits.concurrency)]
    try:
        await asyncio.gather(*slots)
    finally:
        for task in slots:
            task.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        threads.close()


class _SpecSource:
    """Serialises requests for the next spec: an asynchronous generator must not be advanced twice at once."""

    def __init__(self, specs: Iterable[EpisodeSpec] | AsyncIterable[EpisodeSpec]) -> None:
        self._lock = asyncio.Lock()
        self._specs = aiter(specs) if isinstance(specs, AsyncIterable) else iter(specs)

    async def take(self) -> EpisodeSpec | None:
        """The next one; None after the last."""
        async with self._lock:
            if isinstance(self._specs, AsyncIterator):
                return await anext(self._specs, None)
            return next(self._specs, None)


class _Clock:
    """The time an episode has left."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else self._now() + seconds

    @property
    def left(self) -> float | None:
        """Seconds, >= 0; None: no limit."""
        return None if self._end is None else max(self._end - self._now(), 0.0)

    def bound(self, seconds: float) -> float:
        """The shorter of `seconds` and what is left."""
        left = self.left
        return seconds if left is None else min(seconds, left)

    @property
    def over(self) -> bool:
        return self._end is not None and self._now() >= self._end

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


@dataclass
class _ActiveEpisode:
    """An episode in flight, its environment and its time limit."""

    episode: Episode
    clock: _Clock
    env: TextEnvironment | None = None
    abandoned: bool = False
    """A thread that nothing waits for any more is inside the environment; it may never return."""

    def close(self) -> None:
        close_environment(self.env)

    def abandon(self) -> Callable[[], None]:
        """Leave the environment to the thread inside it; returns what that thread calls should it ever return."""
        self.abandoned = True
        return self.close


@dataclass(frozen=True)
class _Runner:
    engine: AsyncTokenEngine
    make_env: MakeEnvironment
    limits: PlayLimits
    threads: CallThreads
    greedy: bool

    async def run(self, specs: _SpecSource, on_finished: OnFinished) -> None:
        """Play one episode after another in one of the `concurrency` slots."""
        while (spec := await specs.take()) is not None:
            await on_finished(await self._play(spec))

    async def _play(self, spec: EpisodeSpec) -> Trajectory:
        active = _ActiveEpisode(Episode(spec, self.limits.episode, self.greedy), _Clock(self.limits.episode_timeout))
        episode = active.episode
        try:
            await self._start(active)
            while episode.running:
                generation = await self._sample(active)
                action = None if generation is None else episode.record(generation)
                if action is not None:
                    await self._act(active, action)
        finally:
            if active.env is not None and not active.abandoned:
                await self.threads.call(active.close, self.limits.step_timeout)
        return episode.trajectory()

    async def _start(self, active: _ActiveEpisode) -> None:
        spec = active.episode.spec

        def start() -> tuple[Any, Any]:
            active.env = env = self.make_env(spec)
            return env.reset(spec.seed, spec.options), env.stop_tokens

        result = await self._call(active, start)
        if result.error is None:
            active.episode.begin(*result.value)

    async def _act(self, active: _ActiveEpisode, action: tuple[int, ...]) -> None:
        env = active.env
        assert env is not None, "made by _start"
        result = await self._call(active, lambda: env.step(action))
        if result.error is None:
            active.episode.advance(action, result.value)

    async def _call(self, active: _ActiveEpisode, function: Callable[[], Any]) -> CallResult:
        """Call into the environment; an exception or a time-out ends the episode.

        With a `step_timeout` a call may outlast the episode's time: cutting it would leave unknown what the action led
        to.
        """
        seconds = self.limits.step_timeout or active.clock.left
        result = await self.threads.call(function, seconds, on_abandon=active.abandon)
        if result.error is not None:
            active.episode.fail(result.error)
        return result

    async def _sample(self, active: _ActiveEpisode) -> Generation | None:
        """One generation fit for recording; None if the engine gives none, and the episode is over then."""
        episode = active.episode
        for attempt in range(self.limits.engine_retries + 1):
            if attempt:
                pause = self.limits.engine_pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(active.clock.bound(min(pause, _LONGEST_PAUSE)))
            if active.clock.over:
                episode.time_out()
                return None
            try:
                return await self._generate(active)
            except EngineError as error:
                failure = error
            if not failure.retriable:
                break
        if active.clock.over:
            episode.time_out()
        else:
            episode.abort(failure)
        return None

    async def _generate(self, active: _ActiveEpisode) -> Generation:
        episode, limit = active.episode, self.limits.engine_timeout
        seconds = active.clock.left if limit is None else active.clock.bound(limit)
        # A copy: an engine call that timed out may still be reading it.
        prompt, budget = list(episode.tokens), episode.budget
        call = self.engine.agenerate(prompt, budget, episode.stop_tokens, self.greedy)
        try:
            generation = await asyncio.wait_for(call, seconds)
        except asyncio.TimeoutError as error:
            raise EngineUnavailableError(
                "engine did not answer", found=f"nothing after {seconds} s", setting=_setting("engine_timeout")
            ) from error
        check_generation(generation, len(prompt), budget)
        return generation
