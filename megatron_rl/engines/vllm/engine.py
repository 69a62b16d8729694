"""The vLLM engine that episodes are played with: it spreads calls over replicas and refuses faulty completions.

Invariants:

* A generation was sampled by one version: weights change only while no call is in flight (`replica_set`).
* A call is repeated until one completion is valid or its attempts are used up; at most one completion is returned.
"""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_rl.engines import Generation
from megatron_rl.engines.vllm.completion import CompletionRequest, as_request, to_generation
from megatron_rl.engines.vllm.prefix_affinity import PrefixAffinity
from megatron_rl.engines.vllm.replica import Footprint, Replica
from megatron_rl.engines.vllm.replica_set import ReplicaSet, ReplicaSetSettings, gather
from megatron_rl.engines.vllm.replica_state import ReplicaState, Weights
from megatron_rl.errors import (
    ConfigError,
    EngineAnswerError,
    EngineUnavailableError,
    EngineVersionError,
    RolloutError,
)
from megatron_rl.hf.config import read_hf_config
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutHeader, SamplingTruth

Result = TypeVar("Result")


class VllmEngine:
    """`TokenEngine` and `AsyncTokenEngine` over replicas that hold the same weights. Its methods may be called from any
    thread or event loop; close it, or use it as a context manager.

    Args:
        replicas: at least one; closed with the engine.
        weights: HF directory that they hold or are to hold.
        version: its version.
        temperature: logits are divided by it before sampling; greedy calls choose the arg max.
        seed: of the sampling streams, of which each replica has one of its own, and another one after every update and
            every restart. Which tokens are sampled also depends on which calls share a batch.
        settings: retries, time limits and bounds.

    Raises:
        ConfigError: no replica, or the temperature is not positive.
        EngineError: a replica did not start, or does not load the weights.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        weights: str | Path,
        *,
        version: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
        settings: ReplicaSetSettings | None = None,
    ) -> None:
        if not replicas:
            raise ConfigError("an engine without replicas", field="replicas", found=0, expected=">= 1")
        if not temperature > 0:
            raise ConfigError("temperature", found=temperature, expected="> 0", setting="rollout.temperature")
        self.temperature, self.settings = temperature, settings or ReplicaSetSettings()
        self.model = read_hf_config(weights)
        self._run_id = uuid.uuid4().hex[:8]
        self._replicas = ReplicaSet(replicas, self._tagged(weights, version), self.settings, seed)
        self._affinity: PrefixAffinity[ReplicaState] = PrefixAffinity()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-replicas", daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Weight version that samples new calls."""
        return self._replicas.weights.version

    @property
    def faults(self) -> Counter[str]:
        """Errors that were recovered from, by class name."""
        return self._replicas.faults

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        greedy: bool = False,
        streams: Sequence[int] | None = None,
    ) -> list[Generation]:
        """See `TokenEngine`; prompts are sent concurrently, and `streams` is ignored: vLLM samples from its own.

        Raises:
            RolloutError: a prompt is empty, has an id outside the vocabulary, or does not fit into the context.
            EngineError: no valid completion of one of them.
        """
        requests = [self._request(prompt, max_new_tokens, stop_tokens, greedy) for prompt in prompts]
        return self._call(gather([self._generate(request) for request in requests]))

    async def agenerate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool = False
    ) -> Generation:
        """See `AsyncTokenEngine`; errors as for `generate`."""
        request = self._request(prompt, max_new_tokens, stop_tokens, greedy)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._generate(request), self._loop))

    def load(self, directory: str | Path, version: int) -> None:
        """Change the weights of all replicas; calls from here on are sampled by `version`.

        Args:
            directory: published HF directory.
            version: its version.

        Raises:
            CheckpointError: the directory does not agree with its manifest; nothing was changed.
            EngineError: no replica took the weights or scored the canary as the trainer did; the previous version stays
                in use. A replica that fails alone stops serving and is updated later.
        """
        self._call(self._without_prefixes(self._replicas.load(self._tagged(directory, version))))

    def sleep(self) -> Footprint:
        """Release the device once no call is in flight, until the next call or `load`.

        A sleeping engine holds neither weights nor stored prefixes; a call reads the current version from its directory
        again.

        Raises:
            EngineError: a replica did not go to sleep.
        """
        return self._call(self._without_prefixes(self._replicas.sleep()))

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [N] log-probs of each token given those before it, at temperature 1; 0 at the first."""
        return np.asarray(self._call(self._score([int(token) for token in tokens])), np.float32)

    def reseed(self, seed: int) -> None:
        """Begin the sampling streams of another seed."""
        self._call(self._replicas.reseed(seed))

    def header(self, tokenizer_hash: str) -> RolloutHeader:
        """The header of rollouts recorded with this engine and this vocabulary."""
        fingerprint = ModelFingerprint.of(self.model, tokenizer_hash)
        return RolloutHeader(fingerprint, SamplingTruth(temperature=self.temperature), f"vllm/{self._engine_version}")

    def close(self) -> None:
        """Cancel calls and close the replicas; servers keep running."""
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _tagged(self, directory: str | Path, version: int) -> Weights:
        return Weights(Path(directory).absolute(), version, f"{version}-{self._run_id}")

    def _request(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool
    ) -> CompletionRequest:
        request = as_request(prompt, max_new_tokens, stop_tokens, greedy)
        found, limit = len(request.prompt), self.max_model_len
        if not found or max_new_tokens < 1 or found + max_new_tokens > limit:
            raise RolloutError(
                "the prompt does not fit into the context", field="prompt", found=f"{found} + {max_new_tokens} tokens",
                expected=f"1 or more of each, at most {limit} together",
                setting="batching.token_budget, or rollout.engine_options.max_model_len",
            )  # fmt: skip
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.vocab_size:
            raise RolloutError("id outside the vocabulary", field="prompt", expected=f"0..{self.model.vocab_size - 1}")
        return request

    async def _open(self) -> None:
        await self._replicas.open()
        described = await gather([state.replica.describe() for state in self._replicas.states])
        self.max_model_len, self._engine_version = min(one.max_model_len for one in described), described[0].version
        self.can_sleep = all(one.can_sleep for one in described)

    async def _generate(self, request: CompletionRequest) -> Generation:
        attempt = 0
        while True:
            state = await self._choose(request)
            try:
                generation = await self._complete(state, request)
            except (EngineUnavailableError, EngineAnswerError, EngineVersionError) as error:
                attempt += 1
                # A replica that returned a faulty completion keeps serving: its next one may be valid.
                self._replicas.note(state, error, lost=not isinstance(error, EngineAnswerError))
                if attempt >= self.settings.attempts:
                    raise
                await asyncio.sleep(self.settings.backoff * 2 ** (attempt - 1) * (1 + random.random()))
                continue
            if generation is not None:
                return generation

    async def _complete(self, state: ReplicaState, request: CompletionRequest) -> Generation | None:
        """One attempt on one replica; None where it was cut short before its first token."""
        version = self._replicas.weights.version
        completion = await state.complete(request, self.temperature)
        if completion is None:
            return None
        routes = self.model.num_experts > 0
        generation = to_generation(request, completion, self.model, version, who=state.replica.name, routes=routes)
        if generation is not None:
            self._affinity.remember([*request.prompt, *completion.tokens], state)
        return generation

    async def _choose(self, request: CompletionRequest | None) -> ReplicaState:
        """The serving replica that has the prompt's prefix stored, unless it is much busier than the least busy one.

        Raises:
            EngineUnavailableError: see `ReplicaSet.serving`.
        """
        serving = await self._replicas.serving()
        least = min(serving, key=lambda state: len(state.calls))
        owner = self._affinity.find(request.prompt) if request and len(serving) > 1 else None
        if owner in serving and len(owner.calls) <= len(least.calls) + self.settings.stickiness:
            return owner
        return least

    async def _score(self, tokens: list[int]) -> list[float]:
        state = await self._choose(None)
        return await state.replica.score(tokens)

    async def _without_prefixes(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Await a change after which no replica has stored prefixes."""
        try:
            return await change
        finally:
            self._affinity.clear()

    async def _close(self) -> None:
        await self._replicas.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
