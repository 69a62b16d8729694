"""A replica's place in the pool: whether it serves, which weights it holds, and what it is busy with."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.engines.canary import Canary, require_canary
from megatron_rl.engines.vllm.completion import Completion, CompletionRequest
from megatron_rl.engines.vllm.replica import Footprint, Replica
from megatron_rl.errors import EngineVersionError


@dataclass(frozen=True)
class Weights:
    """One version as it lies on the disk."""

    directory: Path
    version: int
    tag: str
    """What replicas call it; no other run uses the same."""


@dataclass(eq=False)
class ReplicaState:
    """Invariants:

    * `serving` implies that `tag` named the replica's weights when last looked, after their proof.
    * Each time it serves anew it samples a stream that no replica has sampled before, also after a restart.
    * No call is in flight while weights change or leave, so that a call's version is the one it was sent under.
    """

    replica: Replica
    seeds: np.random.Generator
    """Of its streams."""
    serving: bool = False
    mixed: bool = False
    """An update of its weights began and did not end: it may hold layers of two versions."""
    asleep: bool = False
    """It was sent to sleep: it holds no weights until the next `switch`, even if it was restarted since."""
    calls: set[asyncio.Task[Completion]] = field(default_factory=set)
    """In flight."""
    concern: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where somebody should look at it now."""

    async def ask(self, question: CompletionRequest, temperature: float) -> Completion | None:
        """None where the call was withdrawn because the weights are about to change."""
        call = asyncio.create_task(self.replica.ask(question, temperature))
        self.calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            # Also where the caller gives up: the replica must not go on for nobody.
            call.cancel()
            self.calls.discard(call)
        return None if call.cancelled() else call.result()

    async def reseed(self) -> None:
        """Begin the next sampling stream."""
        await self.replica.reseed(int(self.seeds.integers(1 << 62)))

    async def drain(self, *, finish: bool, grace: float) -> None:
        """Wait until nothing is in flight, with the replica paused.

        Args:
            finish: let calls end by themselves; else they end early and go on under the next weights.
            grace: seconds for answers on their way; calls that a paused replica holds back never answer and are
                withdrawn then.
        """
        while finish and self.calls:
            await asyncio.wait(self.calls)
        await self.replica.pause()
        if self.calls:
            await asyncio.wait(self.calls, timeout=grace)
        for call in list(self.calls):
            call.cancel()
        while self.calls:
            await asyncio.sleep(0)

    async def switch(self, weights: Weights, max_k3: float, *, finish: bool = False, grace: float = 2.0) -> None:
        """Drain, wake, load, prove, resume. On an error it stays paused and does not serve.

        Raises:
            EngineError: the replica did not take the weights, or holds others afterwards.
        """
        self.serving = False
        await self.drain(finish=finish, grace=grace)
        self.mixed = True
        if self.asleep:
            await self.replica.wake()
            self.asleep = False
        await self.replica.load(weights.directory, weights.tag)
        self.mixed = False
        await self.prove(weights, max_k3)

    async def sleep(self, *, grace: float = 2.0) -> Footprint:
        """Let calls end by themselves, then give the memory back: it serves again after a `switch`.

        Raises:
            EngineError: it does not say that it sleeps.
        """
        self.serving = False
        await self.drain(finish=True, grace=grace)
        self.asleep = True
        return await self.replica.sleep()

    async def prove(self, weights: Weights, max_k3: float) -> None:
        """Compare what is held with what was published, show the canary, begin a sampling stream, and serve.

        Raises:
            EngineVersionError: other weights.
        """
        if different := await self.replica.differing(weights.directory):
            raise EngineVersionError(
                "the engine holds other weights than were published",
                file=self.replica.name, field=different[0], found=f"{len(different)} parameters differ",
                expected=f"version {weights.version}",
            )  # fmt: skip
        await self.replica.resume()
        if canary := Canary.read(weights.directory):
            scores = await self.replica.score(canary.tokens.tolist())
            require_canary(canary, scores, max_k3, who=self.replica.name)
        await self.reseed()
        self.serving = True

    async def is_as_proven(self, weights: Weights) -> bool:
        """Whether the replica answers and still calls its weights by the tag: a restarted one does not."""
        return await self.replica.tag() == weights.tag and not self.mixed and not self.asleep

    async def close(self) -> None:
        """Withdraw calls and let go of the replica."""
        for call in list(self.calls):
            call.cancel()
        with contextlib.suppress(Exception):
            await self.replica.close()
