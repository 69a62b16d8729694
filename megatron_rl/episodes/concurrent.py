"""Plays many text environments at once with an engine that takes calls one by one.

Invariants, beyond those of every record (`episode_state`):

* What an episode records depends on its spec, its environment and the engine's answers, never on the other episodes.
* At most `concurrency` episodes exist that are not handed out; a slow `on_finished` therefore slows the start of new
  ones. No episode waits for another's engine, environment or hand-out, except for a free place.
* Every engine call carries the exact tokens of the record so far: generated ids are never turned into text and back.
* An environment that raises, hangs, or shows what cannot be recorded ends its own episode only, with the reason in
  `metadata["error"]`. An engine that does not answer is asked again, and then the episode is `aborted`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_rl.engines import AsyncTokenEngine, Generation
from megatron_rl.environments.base import EpisodeSpec, TextEnvironment, close_environment
from megatron_rl.episodes.env_threads import CallThreads, Returned
from megatron_rl.episodes.episode import Episode, EpisodeLimits, check_generation
from megatron_rl.episodes.lockstep import MakeEnvironment
from megatron_rl.errors import ConfigError, EngineError, EngineUnavailableError
from megatron_rl.rollouts.schema import Trajectory

OnFinished = Callable[[Trajectory], Awaitable[None]]
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class PlayLimits:
    """How many episodes, how long, and with how much patience. Times are seconds of the wall clock; None: no limit.

    Raises:
        ConfigError: a number is too small.
    """

    episode: EpisodeLimits
    """What ends an episode early."""
    concurrency: int = 128
    """Episodes at a time."""
    episode_seconds: float | None = None
    """From the start of an episode on. One that takes longer is `timeout`, a truncation, as soon as no environment call
    is under way."""
    environment_seconds: float | None = 60.0
    """One call of an environment: its construction with `reset`, `step`, or `close`; None: as long as the episode."""
    environment_threads: int = 32
    """Environment calls at a time."""
    max_stuck_environments: int = 64
    """Environment calls that never returned. More are an error, since each keeps a thread."""
    engine_seconds: float | None = None
    """One engine call; one that takes longer is made again."""
    engine_retries: int = 3
    """How often a failed engine call is made again before its episode is aborted."""
    engine_pause: float = 1.0
    """Pause before the first repeated call; it doubles each time, with a random factor between 0.5 and 1.5."""

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("environment_threads", 1), ("max_stuck_environments", 0),
                            ("engine_retries", 0), ("engine_pause", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(
                    "limit of the player", field=name, found=getattr(self, name), expected=f">= {least}", setting=name
                )
        for name in ("episode_seconds", "environment_seconds", "engine_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError("time limit", field=name, found=value, expected="> 0, or None", setting=name)


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
        engine: called once per turn, and again for what an update of the weights interrupted.
        make_env: builds the environment of one episode. Its calls are made one at a time but in changing threads.
        specs: what to play, asked for the next one whenever there is room, one request at a time; it may choose by what
            has finished and, if asynchronous, wait until there is something to play.
        on_finished: awaited with each trajectory as it finishes, for several episodes at a time. The place of an
            episode is free for the next one when it returns.
        greedy: see the engine; greedy trajectories are for evaluation only.

    Raises:
        RolloutError: more environment calls hang than `max_stuck_environments`.
        Exception: what `specs`, `on_finished` or the engine raised, `EngineError` excepted; other episodes are
            cancelled.
    """
    threads = CallThreads(limits.environment_threads, limits.max_stuck_environments)
    player = _Player(engine, make_env, limits, threads, greedy)
    source = _Source(specs)
    places = [asyncio.create_task(player.fill(source, on_finished)) for _ in range(limits.concurrency)]
    try:
        await asyncio.gather(*places)
    finally:
        for task in places:
            task.cancel()
        await asyncio.gather(*places, return_exceptions=True)
        threads.close()


class _Source:
    """Specs for whoever asks, one at a time: an asynchronous generator cannot be asked twice at once."""

    def __init__(self, specs: Iterable[EpisodeSpec] | AsyncIterable[EpisodeSpec]) -> None:
        self._turn = asyncio.Lock()
        self._specs = aiter(specs) if isinstance(specs, AsyncIterable) else iter(specs)

    async def take(self) -> EpisodeSpec | None:
        """The next one; None after the last."""
        async with self._turn:
            if isinstance(self._specs, AsyncIterator):
                return await anext(self._specs, None)
            return next(self._specs, None)


class _Clock:
    """The time an episode has left."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else self._now() + seconds

    def allows(self, seconds: float | None) -> float | None:
        """The shorter of `seconds` and what is left."""
        if self._end is None:
            return seconds
        left = max(self._end - self._now(), 0.0)
        return left if seconds is None else min(seconds, left)

    @property
    def over(self) -> bool:
        return self._end is not None and self._now() >= self._end

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


@dataclass
class _Seat:
    """An episode and its environment."""

    episode: Episode
    clock: _Clock
    env: TextEnvironment | None = None
    abandoned: bool = False
    """A thread that nobody waits for is inside the environment, maybe for ever."""

    def close(self) -> None:
        close_environment(self.env)

    def abandon(self) -> Callable[[], None]:
        """Leave the environment to the thread inside it; returns what that thread is to do when it comes out."""
        self.abandoned = True
        return self.close


@dataclass(frozen=True)
class _Player:
    engine: AsyncTokenEngine
    make_env: MakeEnvironment
    limits: PlayLimits
    threads: CallThreads
    greedy: bool

    async def fill(self, specs: _Source, on_finished: OnFinished) -> None:
        """Play one episode after another in one of the `concurrency` places."""
        while (spec := await specs.take()) is not None:
            await on_finished(await self._play(spec))

    async def _play(self, spec: EpisodeSpec) -> Trajectory:
        seat = _Seat(Episode(spec, self.limits.episode, self.greedy), _Clock(self.limits.episode_seconds))
        episode = seat.episode
        try:
            await self._start(seat)
            while episode.running:
                generation = await self._sample(seat)
                action = None if generation is None else episode.record(generation)
                if action is not None:
                    await self._act(seat, action)
        finally:
            if seat.env is not None and not seat.abandoned:
                await self.threads.call(seat.close, self.limits.environment_seconds)
        return episode.trajectory()

    async def _start(self, seat: _Seat) -> None:
        spec = seat.episode.spec

        def start() -> tuple[Any, Any]:
            seat.env = self.make_env(spec)
            return seat.env.reset(spec.seed, spec.options), seat.env.stop_tokens

        returned = await self._call(seat, start)
        if returned.error is None:
            seat.episode.begin(*returned.value)

    async def _act(self, seat: _Seat, action: tuple[int, ...]) -> None:
        returned = await self._call(seat, lambda: seat.env.step(action))
        if returned.error is None:
            seat.episode.advance(action, returned.value)

    async def _call(self, seat: _Seat, function: Callable[[], Any]) -> Returned:
        """Call into the environment; a failure ends the episode.

        A call that has a limit of its own may outlast the episode's time: cut in its midst it would leave unknown what
        the action led to.
        """
        seconds = self.limits.environment_seconds or seat.clock.allows(None)
        returned = await self.threads.call(function, seconds, give_up=seat.abandon)
        if returned.error is not None:
            seat.episode.fail(returned.error)
        return returned

    async def _sample(self, seat: _Seat) -> Generation | None:
        """One answer fit for recording; None if there is none to be had, and the episode is over then."""
        episode = seat.episode
        for attempt in range(self.limits.engine_retries + 1):
            if attempt:
                pause = self.limits.engine_pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(seat.clock.allows(min(pause, _LONGEST_PAUSE)))
            if seat.clock.over:
                episode.time_out()
                return None
            try:
                return await self._ask(seat)
            except EngineError as error:
                failure = error
            if not failure.retriable:
                break
        if seat.clock.over:
            episode.time_out()
        else:
            episode.abort(failure)
        return None

    async def _ask(self, seat: _Seat) -> Generation:
        episode, seconds = seat.episode, seat.clock.allows(self.limits.engine_seconds)
        # A copy: an engine that was given up on may still be reading it.
        prompt, budget = list(episode.tokens), episode.budget
        call = self.engine.agenerate(prompt, budget, episode.stop_tokens, self.greedy)
        try:
            generation = await asyncio.wait_for(call, seconds)
        except asyncio.TimeoutError as error:
            raise EngineUnavailableError(
                "engine did not answer", found=f"nothing after {seconds} s", setting="engine_seconds"
            ) from error
        check_generation(generation, len(prompt), budget)
        return generation
