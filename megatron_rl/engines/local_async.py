"""The embedded engine for concurrent callers: calls that wait together become one batch, in a thread of its own.

Invariants:

* A generation was sampled by one weight version: weights change between batches, never inside one.
* `update` either serves the new weights, or raises and keeps serving the old ones.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron_rl.engines import Generation
from megatron_rl.engines.canary import Canary, require_canary
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.publication import check_publication
from megatron_rl.rollouts.schema import RolloutHeader

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Call:
    prompt: Sequence[int]
    kind: tuple[int, tuple[int, ...], bool]
    """max_new_tokens, stop_tokens, greedy: the same for all calls of a batch."""
    result: asyncio.Future[Generation]


class LocalAsyncEngine:
    """Serves a `LocalEngine` to many episodes. All calls must come from one event loop.

    Args:
        engine: not to be used by the caller any more.
        max_canary_k3: bound on the mean k3 between the trainer's and this engine's log-probs of the canary, nats.
        max_batch: most prompts of one batch.
    """

    def __init__(self, engine: LocalEngine, *, max_canary_k3: float = 0.01, max_batch: int = 128) -> None:
        self._engine, self._max_k3, self._max_batch = engine, max_canary_k3, max_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-engine")
        self._waiting: list[_Call] = []
        self._serving: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Weight version that samples new calls."""
        return self._engine.version

    @property
    def context_limit(self) -> int:
        """Most tokens of a sequence."""
        return self._engine.model.config.max_position_embeddings

    def header(self, tokenizer_hash: str) -> RolloutHeader:
        """The header of rollouts recorded with this engine and this vocabulary."""
        return self._engine.header(tokenizer_hash)

    async def agenerate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool = False
    ) -> Generation:
        """See `AsyncTokenEngine`."""
        kind = (max_new_tokens, tuple(stop_tokens), greedy)
        call = _Call(prompt, kind, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await call.result

    async def update(self, weights: Path, version: int) -> None:
        """Serve other weights. Calls in flight end under the old ones.

        Args:
            weights: published HF directory.
            version: its version.

        Raises:
            CheckpointError, EngineVersionError: the directory is damaged, or its weights score the trainer's canary
                differently; the old weights stay in use.
        """
        await self._in_thread(lambda: self._load(weights, version))

    async def sleep(self) -> None:
        """Release the device until the next call or update: weights go to the CPU, stored prefixes are dropped."""
        await self._in_thread(self._engine.sleep)

    async def close(self) -> None:
        """End the thread; waiting callers are cancelled."""
        for call in self._waiting:
            call.result.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        while self._waiting:
            # Let every caller that is ready join the batch.
            await asyncio.sleep(0)
            batch = self._next_batch()
            if not batch:
                continue
            try:
                generations = await self._in_thread(partial(self._generate, batch))
            except Exception as error:  # whatever it is, the callers handle it
                for call in _waiting(batch):
                    call.result.set_exception(error)
                continue
            found = dict(zip(map(id, batch), generations, strict=True))
            for call in _waiting(batch):
                call.result.set_result(found[id(call)])

    def _generate(self, batch: list[_Call]) -> list[Generation]:
        self._engine.wake()
        return self._engine.generate([call.prompt for call in batch], *batch[0].kind)

    def _next_batch(self) -> list[_Call]:
        """Remove up to `max_batch` calls of the first one's kind from those that wait, cancelled ones left out."""
        self._waiting = _waiting(self._waiting)
        batch = [call for call in self._waiting if call.kind == self._waiting[0].kind][: self._max_batch]
        chosen = set(map(id, batch))
        self._waiting = [call for call in self._waiting if id(call) not in chosen]
        return batch

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self, weights: Path, version: int) -> None:
        check_publication(weights, version)
        # A shallow copy loads beside the engine that serves, which stays intact whatever happens.
        candidate = copy.copy(self._engine)
        candidate.load(weights, version)
        canary = Canary.read(weights)
        if canary is not None:
            require_canary(canary, _score(candidate, canary), self._max_k3, who=str(weights))
        self._engine = candidate


def _score(engine: LocalEngine, canary: Canary) -> np.ndarray:
    """float32 [N] log-probs of the canary's tokens at temperature 1, whatever the engine samples at."""
    scorer = copy.copy(engine)
    scorer.temperature = 1.0
    return scorer.score(canary.tokens.tolist())


def _waiting(calls: list[_Call]) -> list[_Call]:
    """Those whose caller was not cancelled."""
    return [call for call in calls if not call.result.done()]
