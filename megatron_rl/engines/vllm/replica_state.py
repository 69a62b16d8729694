"""What a `ReplicaSet` knows of one replica: whether it serves, which weights it holds, and its calls in flight."""

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
    """One published version.

    Example:
        `Weights(Path("weights/version-000003"), 3, "3-1f0c2a9b")`
    """

    directory: Path
    """HF checkpoint directory."""
    version: int
    tag: str
    """Its name on the replicas; no other run uses the same."""


@dataclass(eq=False)
class ReplicaState:
    """Invariants:

    * `serving` implies that the replica's tag was that of its weights at the last check, and that they were verified.
    * Each time it starts to serve it samples a stream that no replica has sampled before, also after a restart.
    * No call is in flight while weights change or leave, so that a call's version is the one it was sent under.
    """

    replica: Replica
    seeds: np.random.Generator
    """Of its sampling streams."""
    serving: bool = False
    mixed: bool = False
    """A weight update began and did not end: the replica may hold layers of two versions."""
    asleep: bool = False
    """It was sent to sleep: it holds no weights until the next `switch`, even if it was restarted since."""
    calls: set[asyncio.Task[Completion]] = field(default_factory=set)
    """In flight."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where its next health check should not wait."""

    async def complete(self, request: CompletionRequest, temperature: float) -> Completion | None:
        """The replica's completion; None where the call was cancelled because the weights are about to change."""
        call = asyncio.create_task(self.replica.complete(request, temperature))
        self.calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            # Also where the caller is cancelled: the replica must not sample a completion that is not used.
            call.cancel()
            self.calls.discard(call)
        return None if call.cancelled() else call.result()

    async def reseed(self) -> None:
        """Begin the next sampling stream."""
        await self.replica.reseed(int(self.seeds.integers(1 << 62)))

    async def drain(self, *, finish: bool, grace: float) -> None:
        """Wait until no call is in flight, with the replica paused.

        Args:
            finish: let calls end by themselves; else they end early and are continued under the next weights.
            grace: seconds for completions on their way; calls that a paused replica holds back never complete and are
                cancelled then.
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
        """Drain, wake, load, verify, serve. On an error the replica stays paused and does not serve.

        Args:
            weights: to be loaded.
            max_k3: see `verify`.
            finish, grace: see `drain`.

        Raises:
            EngineError: the replica did not load the weights, or holds others afterwards.
        """
        self.serving = False
        await self.drain(finish=finish, grace=grace)
        self.mixed = True
        if self.asleep:
            await self.replica.wake()
            self.asleep = False
        await self.replica.load(weights.directory, weights.tag)
        self.mixed = False
        await self.verify(weights, max_k3)

    async def sleep(self, *, grace: float = 2.0) -> Footprint:
        """Let calls end by themselves, then release the memory; the replica serves again after a `switch`.

        Raises:
            EngineError: it did not go to sleep.
        """
        self.serving = False
        await self.drain(finish=True, grace=grace)
        self.asleep = True
        return await self.replica.sleep()

    async def verify(self, weights: Weights, max_k3: float) -> None:
        """Compare parameters with the files, score the canary, begin a sampling stream, and serve.

        Args:
            weights: which it should hold.
            max_k3: bound on the canary's mean k3, nats.

        Raises:
            EngineVersionError: it holds other weights.
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
            require_canary(canary, np.asarray(scores, np.float64), max_k3, who=self.replica.name)
        await self.reseed()
        self.serving = True

    async def holds(self, weights: Weights) -> bool:
        """Whether the replica answers and still names its weights by this tag: a restarted one does not."""
        return await self.replica.tag() == weights.tag and not self.mixed and not self.asleep

    async def close(self) -> None:
        """Cancel calls and close the replica."""
        for call in list(self.calls):
            call.cancel()
        with contextlib.suppress(Exception):
            await self.replica.close()
