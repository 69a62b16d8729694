"""The replicas of an engine: which weights they hold, which of them serve, how lost ones recover, and when all sleep.

Invariants:

* Weights change, and replicas go to sleep, only while no call is in flight, and one such change at a time.
* A replica serves only after it was verified to hold the set's weights, also after it slept, or was lost and recovered.
* An update that no replica can take leaves the version as it was, on every replica that still answers.
* While the set sleeps, the health check only asks replicas whether they sleep; one that was restarted sleeps again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megatron_rl.engines.publication import check_publication
from megatron_rl.engines.vllm.replica import Footprint, Replica
from megatron_rl.engines.vllm.replica_state import ReplicaState, Weights
from megatron_rl.errors import EngineError, EngineUnavailableError, EngineVersionError, MegatronRLError

Result = TypeVar("Result")


@dataclass(frozen=True)
class ReplicaSetSettings:
    """Retries, time limits and bounds. Times in seconds."""

    attempts: int = 4
    """Times that a call is sent before its error is raised."""
    backoff: float = 0.25
    """Pause after the first failed attempt, doubled after each, with up to as much again at random."""
    patience: float = 300.0
    """How long a call waits until a replica serves."""
    health_every: float = 5.0
    """Between two health checks of a replica."""
    start_timeout: float = 600.0
    """Until all replicas serve at first."""
    finish_calls: bool = False
    """Let calls end before weights change, instead of ending them early and continuing under the new version."""
    max_k3: float = 0.01
    """Bound on the canary's mean k3, nats."""
    stickiness: int = 8
    """How many more calls in flight than the least busy replica the one with a stored prefix may have."""


class ReplicaSet:
    """Replicas that hold the same weights. All methods run in one event loop.

    Args:
        replicas: at least one.
        weights: what they hold or are to hold.
        settings: retries, time limits and bounds.
        seed: of the replicas' sampling streams.
    """

    def __init__(
        self, replicas: Sequence[Replica], weights: Weights, settings: ReplicaSetSettings, seed: int = 0
    ) -> None:
        streams = _streams(seed)
        self.states = [ReplicaState(replica, next(streams)) for replica in replicas]
        self.weights, self.settings = weights, settings
        self.sleeping = False
        """Whether replicas sleep until the next call or update."""
        self.faults: Counter[str] = Counter()
        """Errors that were recovered from, by class name."""
        self._change_lock = asyncio.Lock()
        """Held by an update, by going to sleep and by waking."""
        self._admitting = asyncio.Event()
        """Set while new calls may be sent."""
        self._recovered = asyncio.Event()
        """Set when a replica may serve that did not."""
        self._health_checks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Wait until all serve, and start their health checks.

        Raises:
            EngineError: one does not start, or does not load the weights.
        """
        await gather([self._start(state) for state in self.states])
        self._admitting.set()
        self._health_checks = [asyncio.create_task(self._check_regularly(state)) for state in self.states]

    async def serving(self) -> list[ReplicaState]:
        """The replicas that serve now, at least one; they are woken if they sleep.

        Raises:
            EngineUnavailableError: none serves for `patience` seconds.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self.settings.patience
        while True:
            await self._admitting.wait()
            if self.sleeping:
                await self._wake()
                continue
            if found := [state for state in self.states if state.serving]:
                return found
            self._recovered.clear()
            try:
                await asyncio.wait_for(self._recovered.wait(), deadline - now())
            except (TimeoutError, asyncio.TimeoutError):
                expected = f"one within {self.settings.patience:g} s"
                raise EngineUnavailableError("no engine replica serves", found=0, expected=expected) from None

    def note(self, state: ReplicaState, error: EngineError, *, lost: bool) -> None:
        """Count an error of a replica; one that is `lost` does not serve until it is verified again."""
        self.faults[type(error).__name__] += 1
        if lost:
            state.serving = False
            state.check_now.set()

    async def load(self, weights: Weights) -> None:
        """Change the weights of all replicas.

        Raises:
            CheckpointError: the directory does not agree with its manifest; nothing was changed.
            EngineError: no replica took the weights; the previous version stays in use.
        """
        async with self._change_lock:
            await asyncio.to_thread(check_publication, weights.directory, weights.version)
            with self._calls_held_back(sleeping=False):
                await self._switch_all(weights)

    async def sleep(self) -> Footprint:
        """Send all replicas to sleep once their calls have ended; the next call or update wakes them.

        Returns:
            The largest footprint of a replica, before and after.

        Raises:
            EngineError: one did not go to sleep. The set counts as sleeping nevertheless.
        """
        async with self._change_lock:
            with self._calls_held_back(sleeping=True):
                found = await gather([state.sleep() for state in self.states])
        return Footprint(max(one.awake for one in found), max(one.asleep for one in found))

    async def reseed(self, seed: int) -> None:
        """Begin the sampling streams of another seed on every replica."""
        for state, stream in zip(self.states, _streams(seed), strict=False):
            state.seeds = stream
        await gather([state.reseed() for state in self.states if state.serving or state.asleep])

    async def close(self) -> None:
        """Cancel calls and close the replicas."""
        for task in self._health_checks:
            task.cancel()
        await asyncio.gather(*self._health_checks, return_exceptions=True)
        await gather([state.close() for state in self.states])

    async def _start(self, state: ReplicaState) -> None:
        """Wait until a replica answers; verify and tag its weights, or load ours if it holds others or sleeps."""
        now = asyncio.get_running_loop().time
        deadline = now() + self.settings.start_timeout
        while True:
            try:
                state.asleep = await state.replica.is_sleeping()
                break
            except EngineUnavailableError:
                if now() > deadline:
                    raise
                await asyncio.sleep(1.0)
        if not state.asleep:
            with contextlib.suppress(EngineVersionError):
                await state.verify(self.weights, self.settings.max_k3)
                await state.replica.set_tag(self.weights.tag)
                return
        await state.switch(self.weights, self.settings.max_k3)

    @contextlib.contextmanager
    def _calls_held_back(self, *, sleeping: bool) -> Iterator[None]:
        """No new call is sent inside. Afterwards the set sleeps, or does not, also where the change failed."""
        self._admitting.clear()
        try:
            yield
        finally:
            self.sleeping = sleeping
            self._admitting.set()
            self._recovered.set()

    async def _wake(self) -> None:
        async with self._change_lock:
            if self.sleeping:
                with self._calls_held_back(sleeping=False):
                    await self._try_each(self.states, self.weights, finish=False)

    async def _switch_all(self, weights: Weights) -> None:
        candidates = [state for state in self.states if state.serving] or self.states
        errors = await self._try_each(candidates, weights, finish=self.settings.finish_calls)
        if None in errors:
            self.weights = weights
            return
        await self._try_each(candidates, self.weights, finish=False)
        first = errors[0]
        if isinstance(first, EngineVersionError):
            raise first
        raise EngineVersionError(
            "no engine replica took the new weights", file=weights.directory, found=first,
            expected=f"version {weights.version}; version {self.weights.version} serves on",
        ) from first  # fmt: skip

    async def _try_each(
        self, states: list[ReplicaState], weights: Weights, *, finish: bool
    ) -> list[BaseException | None]:
        """Switch the weights of several replicas at a time; returns each one's error, None where it succeeded."""
        switches = [state.switch(weights, self.settings.max_k3, finish=finish) for state in states]
        try:
            results = await asyncio.gather(*switches, return_exceptions=True)
        finally:
            # Also where the caller is cancelled in the middle.
            for state in states:
                if not state.serving:
                    state.check_now.set()
        for error in results:
            if error is not None and not isinstance(error, MegatronRLError):
                raise error
        return results

    async def _check_regularly(self, state: ReplicaState) -> None:
        """Check a replica's health now and then, and recover it where it does not serve."""
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(state.check_now.wait(), self.settings.health_every)
            state.check_now.clear()
            try:
                await self._check_health(state)
            except MegatronRLError as error:
                self.faults[type(error).__name__] += 1
                state.serving = False
                # Not at once again: the next attempt would most likely fail the same way.
                await asyncio.sleep(self.settings.health_every)
            if state.serving:
                self._recovered.set()

    async def _check_health(self, state: ReplicaState) -> None:
        # The first request goes out without the lock: a server that does not answer would delay every update.
        if self.sleeping:
            if await state.replica.is_sleeping():
                return
        elif await state.holds(self.weights) and state.serving:
            return
        async with self._change_lock:
            if self.sleeping:
                if not await state.replica.is_sleeping():
                    await state.sleep()
            elif not await state.holds(self.weights):
                await state.switch(self.weights, self.settings.max_k3)
            elif not state.serving:
                await state.verify(self.weights, self.settings.max_k3)


def _streams(seed: int) -> Iterator[np.random.Generator]:
    """Seed generators, one a replica. Without them servers that were started alike would sample the same tokens."""
    return (np.random.default_rng([seed, number]) for number in itertools.count())


async def gather(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order; the first error cancels the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
