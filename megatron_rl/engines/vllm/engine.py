"""The engine that episodes are played with: calls spread over replicas, versioned weights, faults kept out of records.

Invariants:

* A generation was sampled by one version: weights change only while no call is in flight (`replica_set`).
* A call is asked again until one answer is good or attempts run out; at most one answer is returned.
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
        weights: HF directory that they hold or shall hold.
        version: its version.
        temperature: logits are divided by it before sampling; greedy calls choose the arg max.
        seed: of the sampling streams, of which each replica has one of its own, and another one after every update and
            every restart. Which tokens are sampled also depends on which calls meet in a batch.
        settings: patience and bounds.

    Raises:
        ConfigError: no replica, or the temperature is not positive.
        EngineError: a replica did not come up, or does not take the weights.
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
            raise ConfigError("no replica to play with", field="replicas", found=0, expected=">= 1")
        if not temperature > 0:
            raise ConfigError("temperature", found=temperature, expected="> 0", setting="rollout.temperature")
        self.temperature, self.settings = temperature, settings or ReplicaSetSettings()
        self.model = read_hf_config(weights)
        self._run_id = uuid.uuid4().hex[:8]
        self._replicas = ReplicaSet(replicas, self._named(weights, version), self.settings, seed)
        self._affinity: PrefixAffinity[ReplicaState] = PrefixAffinity()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-pool", daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version that new calls are sampled by."""
        return self._replicas.weights.version

    @property
    def faults(self) -> Counter[str]:
        """Errors that were survived, by class name."""
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
        """See `TokenEngine`; prompts are asked concurrently, and `streams` is not used: vLLM has one of its own.

        Raises:
            RolloutError: a prompt is empty, has an id outside the vocabulary, or no room left.
            EngineError: no good answer to one of them.
        """
        questions = [self._question(prompt, max_new_tokens, stop_tokens, greedy) for prompt in prompts]
        return self._call(gather([self._answer(question) for question in questions]))

    async def agenerate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool = False
    ) -> Generation:
        """See `AsyncTokenEngine`; errors as for `generate`."""
        question = self._question(prompt, max_new_tokens, stop_tokens, greedy)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(question), self._loop))

    def load(self, directory: str | Path, version: int) -> None:
        """Change the weights of all replicas; calls from here on are sampled by `version`.

        Raises:
            CheckpointError: the directory does not agree with its manifest; nothing was changed.
            EngineError: no replica took the weights or scored the canary as the trainer did; the version before serves
                on. A replica that fails alone is taken out and brought up to date later.
        """
        self._call(self._forgetting(self._replicas.load(self._named(directory, version))))

    def sleep(self) -> Footprint:
        """Leave the device once no call is in flight, until the next call or `load`: it holds neither weights nor
        stored prefixes then, and the present version is read from its directory again if it is needed.

        Raises:
            EngineError: a replica did not go to sleep.
        """
        return self._call(self._forgetting(self._replicas.sleep()))

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [N] log-probs of these tokens at temperature 1, 0 at the first; each after those before it."""
        ids = [int(token) for token in tokens]
        return np.asarray(self._call(self._on_any(lambda state: state.replica.score(ids))), np.float32)

    def reseed(self, seed: int) -> None:
        """Begin the sampling streams of another seed."""
        self._call(self._replicas.reseed(seed))

    def header(self, tokenizer_hash: str) -> RolloutHeader:
        """The header of rollouts recorded with this engine and this vocabulary."""
        model = self.model
        fingerprint = ModelFingerprint(
            architecture=model.model_type,
            vocab_size=model.vocab_size,
            num_experts=model.num_experts,
            topk=model.topk,
            moe_layers=model.moe_layers,
            tokenizer_hash=tokenizer_hash,
        )
        return RolloutHeader(fingerprint, SamplingTruth(temperature=self.temperature), f"vllm/{self._engine_version}")

    def close(self) -> None:
        """Withdraw calls and let go of the replicas; servers go on."""
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _named(self, directory: str | Path, version: int) -> Weights:
        return Weights(Path(directory).absolute(), version, f"{version}-{self._run_id}")

    def _question(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool
    ) -> CompletionRequest:
        question = as_request(prompt, max_new_tokens, stop_tokens, greedy)
        found, limit = len(question.prompt), self.max_model_len
        if not found or max_new_tokens < 1 or found + max_new_tokens > limit:
            raise RolloutError(
                "a prompt without room", field="prompt", found=f"{found} + {max_new_tokens} tokens",
                expected=f"1 or more of each, at most {limit} together", setting="context_limit",
            )  # fmt: skip
        if not 0 <= min(question.prompt) <= max(question.prompt) < self.model.vocab_size:
            raise RolloutError("id outside the vocabulary", field="prompt", expected=f"0..{self.model.vocab_size - 1}")
        return question

    async def _open(self) -> None:
        await self._replicas.open()
        described = await gather([state.replica.describe() for state in self._replicas.states])
        self.max_model_len, self._engine_version = min(one.max_model_len for one in described), described[0].version
        self.can_sleep = all(one.can_sleep for one in described)

    async def _answer(self, question: CompletionRequest) -> Generation:
        attempt = 0
        while True:
            state = await self._choose(question)
            try:
                generation = await self._ask(state, question)
            except (EngineUnavailableError, EngineAnswerError, EngineVersionError) as error:
                attempt += 1
                # The answer of one that reports an error, or answers nonsense, may be better the next time.
                self._replicas.note(state, error, lost=not isinstance(error, EngineAnswerError))
                if attempt >= self.settings.attempts:
                    raise
                await asyncio.sleep(self.settings.backoff * 2 ** (attempt - 1) * (1 + random.random()))
                continue
            if generation is not None:
                return generation

    async def _ask(self, state: ReplicaState, question: CompletionRequest) -> Generation | None:
        version = self._replicas.weights.version
        answer = await state.ask(question, self.temperature)
        if answer is None:
            return None
        routes = self.model.num_experts > 0
        generation = to_generation(question, answer, self.model, version, who=state.replica.name, routes=routes)
        if generation is not None:
            self._affinity.remember([*question.prompt, *answer.tokens], state)
        return generation

    async def _choose(self, question: CompletionRequest | None) -> ReplicaState:
        """The serving replica that knows the prompt's beginning, unless it is much busier than the least busy one.

        Raises:
            EngineUnavailableError: none serves, for longer than the pool's patience.
        """
        serving = await self._replicas.serving()
        least = min(serving, key=lambda state: len(state.calls))
        known = self._affinity.find(question.prompt) if question and len(serving) > 1 else None
        if known in serving and len(known.calls) <= len(least.calls) + self.settings.stickiness:
            return known
        return least

    async def _on_any(self, work) -> Any:
        state = await self._choose(None)
        return await work(state)

    async def _forgetting(self, change: Coroutine[Any, Any, Result]) -> Result:
        """A change after which no replica has stored prefixes."""
        try:
            return await change
        finally:
            self._affinity.forget()

    async def _close(self) -> None:
        await self._replicas.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
