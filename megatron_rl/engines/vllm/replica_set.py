"""The replicas behind a pool: which weights they hold, who may be asked, who has to come back, and when all sleep.

Invariants:

* Weights change, and replicas go to sleep, only while no call is in flight, and one such change at a time.
* A replica serves only after it proved to hold the set's weights, also after it slept, or was lost and came back.
* An update that no replica can take leaves the version as it was, on every replica that still answers.
* While the set sleeps, its replicas are asked nothing but whether they sleep; one that was restarted sleeps again.
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
    """Patience and bounds. Times in seconds."""

    attempts: int = 4
    """Times that a call is asked before its error is raised."""
    backoff: float = 0.25
    """Pause after the first failed attempt, doubled after each, with up to as much again at random."""
    patience: float = 300.0
    """How long a call waits for a replica that serves."""
    health_every: float = 5.0
    """Between looks at each replica."""
    start_timeout: float = 600.0
    """Until all replicas serve at first."""
    finish_calls: bool = False
    """Let calls end before weights change, instead of ending them early and going on under the new version."""
    max_k3: float = 0.01
    """Bound on the canary's mean k3, nats."""
    stickiness: int = 8
    """How many more calls in flight than the least busy replica the one with a stored prefix may have."""


class ReplicaSet:
    """Replicas that hold the same weights. All its methods run in one event loop.

    Args:
        replicas: at least one.
        weights: what they hold or shall hold.
        settings: patience and bounds.
        seed: of the replicas' sampling streams.
    """

    def __init__(
        self, replicas: Sequence[Replica], weights: Weights, settings: ReplicaSetSettings, seed: int = 0
    ) -> None:
        streams = _streams(seed)
        self.states = [ReplicaState(replica, next(streams)) for replica in replicas]
        self.weights, self.settings = weights, settings
        self.resting = False
        """Whether replicas sleep until the next call or update."""
        self.faults: Counter[str] = Counter()
        """Errors that were survived, by class name."""
        self._changing, self._gate, self._returned = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Wait until all serve, and look after them from then on.

        Raises:
            EngineError: one does not come up, or does not take the weights.
        """
        await gather([self._bring_up(state) for state in self.states])
        self._gate.set()
        self._watchers = [asyncio.create_task(self._watch(state)) for state in self.states]

    async def serving(self) -> list[ReplicaState]:
        """Those that may be asked now; they are woken if they sleep.

        Raises:
            EngineUnavailableError: none serves, for longer than the pool's patience.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self.settings.patience
        while True:
            await self._gate.wait()
            if self.resting:
                await self._wake()
                continue
            if found := [state for state in self.states if state.serving]:
                return found
            self._returned.clear()
            try:
                await asyncio.wait_for(self._returned.wait(), deadline - now())
            except (TimeoutError, asyncio.TimeoutError):
                expected = f"one within {self.settings.patience:g} s"
                raise EngineUnavailableError("no engine replica serves", found=0, expected=expected) from None

    def note(self, state: ReplicaState, error: EngineError, *, lost: bool) -> None:
        """Count a fault. A replica that is `lost` is out until it proves itself."""
        self.faults[type(error).__name__] += 1
        if lost:
            state.serving = False
            state.concern.set()

    async def load(self, weights: Weights) -> None:
        """Change the weights of all replicas.

        Raises:
            CheckpointError: the directory does not agree with its manifest; nothing was changed.
            EngineError: no replica took the weights; the version before serves on.
        """
        async with self._changing:
            await asyncio.to_thread(check_publication, weights.directory, weights.version)
            with self._between_calls(resting=False):
                await self._switch_all(weights)

    async def sleep(self) -> Footprint:
        """Send all replicas to sleep once their calls have ended; the next call or update wakes them.

        Raises:
            EngineError: one did not go to sleep. All are taken for asleep nevertheless.
        """
        async with self._changing:
            with self._between_calls(resting=True):
                found = await gather([state.sleep() for state in self.states])
        return Footprint(max(one.awake for one in found), max(one.asleep for one in found))

    async def reseed(self, seed: int) -> None:
        """Begin sampling streams of another seed on every replica."""
        for state, stream in zip(self.states, _streams(seed), strict=False):
            state.seeds = stream
        await gather([state.reseed() for state in self.states if state.serving or state.asleep])

    async def close(self) -> None:
        """Withdraw calls and let go of the replicas."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await gather([state.close() for state in self.states])

    async def _bring_up(self, state: ReplicaState) -> None:
        """Wait until a replica answers; name its weights, or give it ours if it holds others or sleeps."""
        now = asyncio.get_running_loop().time
        deadline = now() + self.settings.start_timeout
        while True:
            try:
                state.asleep = await state.replica.sleeps()
                break
            except EngineUnavailableError:
                if now() > deadline:
                    raise
                await asyncio.sleep(1.0)
        if not state.asleep:
            with contextlib.suppress(EngineVersionError):
                await state.prove(self.weights, self.settings.max_k3)
                await state.replica.set_tag(self.weights.tag)
                return
        await state.switch(self.weights, self.settings.max_k3)

    @contextlib.contextmanager
    def _between_calls(self, *, resting: bool) -> Iterator[None]:
        """No new call is sent meanwhile. Afterwards the replica_set rests, or does not, whatever happened."""
        self._gate.clear()
        try:
            yield
        finally:
            self.resting = resting
            self._gate.set()
            self._returned.set()

    async def _wake(self) -> None:
        async with self._changing:
            if self.resting:
                with self._between_calls(resting=False):
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
        switches = [state.switch(weights, self.settings.max_k3, finish=finish) for state in states]
        try:
            results = await asyncio.gather(*switches, return_exceptions=True)
        finally:
            # Also where the caller gives up in the middle.
            for state in states:
                if not state.serving:
                    state.concern.set()
        for error in results:
            if error is not None and not isinstance(error, MegatronRLError):
                raise error
        return results

    async def _watch(self, state: ReplicaState) -> None:
        """Look at a replica every so often, and bring one back that does not serve."""
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(state.concern.wait(), self.settings.health_every)
            state.concern.clear()
            try:
                await self._look_after(state)
            except MegatronRLError as error:
                self.faults[type(error).__name__] += 1
                state.serving = False
                # Not at once again: whoever is concerned would only hear the same.
                await asyncio.sleep(self.settings.health_every)
            if state.serving:
                self._returned.set()

    async def _look_after(self, state: ReplicaState) -> None:
        # Asked without the lock: a dead server would hold up everybody's update.
        if self.resting:
            if await state.replica.sleeps():
                return
        elif await state.is_as_proven(self.weights) and state.serving:
            return
        async with self._changing:
            if self.resting:
                if not await state.replica.sleeps():
                    await state.sleep()
            elif not await state.is_as_proven(self.weights):
                await state.switch(self.weights, self.settings.max_k3)
            elif not state.serving:
                await state.prove(self.weights, self.settings.max_k3)


def _streams(seed: int) -> Iterator[np.random.Generator]:
    """Seeds for one replica after another. Servers that were started alike would answer alike without them."""
    return (np.random.default_rng([seed, number]) for number in itertools.count())


async def gather(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order; the first error ends the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
