"""The engine that episodes are played with: calls spread over replicas, versioned weights, faults kept out of records.

Invariants:

* A generation was sampled by one version: weights change only while no call is in flight (`member`).
* A call is asked again until one answer is good or attempts run out; at most one answer is returned.
* A replica serves only after it proved to hold the pool's weights, also after it was lost and came back.
* An update that no replica can take leaves the version as it was, on every replica that still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_rl.engines import Generation
from megatron_rl.engines.publication import check_publication
from megatron_rl.engines.vllm.affinity import Affinity
from megatron_rl.engines.vllm.answer import Question, as_question, to_generation
from megatron_rl.engines.vllm.member import Member, Weights
from megatron_rl.engines.vllm.replica import Replica
from megatron_rl.errors import (
    ConfigError,
    EngineAnswerError,
    EngineError,
    EngineUnavailableError,
    EngineVersionError,
    MegatronRLError,
    RolloutError,
)
from megatron_rl.hf.config import read_hf_config
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutHeader, SamplingTruth

Result = TypeVar("Result")


@dataclass(frozen=True)
class PoolSettings:
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


class VllmEngine:
    """`TokenEngine` and `AsyncTokenEngine` over replicas that hold the same weights. Its methods may be called from any
    thread or event loop; close it, or use it as a context manager.

    Args:
        replicas: at least one; closed with the engine.
        weights: HF directory that they hold or shall hold.
        version: its version.
        temperature: logits are divided by it before sampling; greedy calls choose the arg max.
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
        settings: PoolSettings | None = None,
    ) -> None:
        if not replicas:
            raise ConfigError("no replica to play with", field="replicas", found=0, expected=">= 1")
        if not temperature > 0:
            raise ConfigError("temperature", found=temperature, expected="> 0", setting="rollout.temperature")
        self.temperature, self.settings = temperature, settings or PoolSettings()
        self.model = read_hf_config(weights)
        self.faults: Counter[str] = Counter()
        """Errors that were survived, by class name."""
        self._run_id = uuid.uuid4().hex[:8]
        self._weights = self._named(weights, version)
        self._affinity: Affinity[Member] = Affinity()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-pool", daemon=True)
        self._thread.start()
        try:
            self._call(self._open(replicas))
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version that new calls are sampled by."""
        return self._weights.version

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
        return self._call(_gather([self._answer(question) for question in questions]))

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
        self._call(self._load(self._named(directory, version)))

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [N] log-probs of these tokens at temperature 1, 0 at the first; each after those before it."""
        ids = [int(token) for token in tokens]
        return np.asarray(self._call(self._on_any(lambda member: member.replica.score(ids))), np.float32)

    def reseed(self, seed: int) -> None:
        """Restart the sampling streams, one of its own for each replica."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self._members)).tolist()
        members = zip(self._members, seeds, strict=True)
        self._call(_gather([member.replica.reseed(own) for member, own in members if member.serving]))

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
    ) -> Question:
        question = as_question(prompt, max_new_tokens, stop_tokens, greedy)
        found, limit = len(question.prompt), self.max_model_len
        if not found or max_new_tokens < 1 or found + max_new_tokens > limit:
            raise RolloutError(
                "a prompt without room", field="prompt", found=f"{found} + {max_new_tokens} tokens",
                expected=f"1 or more of each, at most {limit} together", setting="context_limit",
            )  # fmt: skip
        if not 0 <= min(question.prompt) <= max(question.prompt) < self.model.vocab_size:
            raise RolloutError("id outside the vocabulary", field="prompt", expected=f"0..{self.model.vocab_size - 1}")
        return question

    async def _open(self, replicas: Sequence[Replica]) -> None:
        # Bound to the pool's event loop, hence not made in the constructor.
        self._changing, self._gate, self._returned = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._members = [Member(replica) for replica in replicas]
        self._watchers: list[asyncio.Task[None]] = []
        await _gather([self._bring_up(member) for member in self._members])
        described = [await member.replica.describe() for member in self._members]
        self.max_model_len, self._engine_version = min(one.max_model_len for one in described), described[0].version
        self._gate.set()
        self._watchers = [asyncio.create_task(self._watch(member)) for member in self._members]

    async def _bring_up(self, member: Member) -> None:
        """Wait until a replica answers; name its weights, or give it ours if it holds others."""
        deadline = self._loop.time() + self.settings.start_timeout
        while True:
            try:
                await member.replica.tag()
                break
            except EngineUnavailableError:
                if self._loop.time() > deadline:
                    raise
                await asyncio.sleep(1.0)
        try:
            await member.prove(self._weights, self.settings.max_k3)
            await member.replica.set_tag(self._weights.tag)
        except EngineVersionError:
            await member.switch(self._weights, self.settings.max_k3)

    async def _answer(self, question: Question) -> Generation:
        attempt = 0
        while True:
            member = await self._choose(question)
            try:
                generation = await self._ask(member, question)
            except (EngineUnavailableError, EngineAnswerError, EngineVersionError) as error:
                attempt += 1
                self._note(member, error)
                if attempt >= self.settings.attempts:
                    raise
                await asyncio.sleep(self.settings.backoff * 2 ** (attempt - 1) * (1 + random.random()))
                continue
            if generation is not None:
                return generation

    async def _ask(self, member: Member, question: Question) -> Generation | None:
        version = self._weights.version
        answer = await member.ask(question, self.temperature)
        if answer is None:
            return None
        routes = self.model.num_experts > 0
        generation = to_generation(question, answer, self.model, version, who=member.replica.name, routes=routes)
        if generation is not None:
            self._affinity.remember([*question.prompt, *answer.tokens], member)
        return generation

    async def _choose(self, question: Question | None) -> Member:
        """The serving replica that knows the prompt's beginning, unless it is much busier than the least busy one.

        Raises:
            EngineUnavailableError: none serves, for longer than the pool's patience.
        """
        deadline = self._loop.time() + self.settings.patience
        while True:
            await self._gate.wait()
            if serving := [member for member in self._members if member.serving]:
                break
            self._returned.clear()
            try:
                await asyncio.wait_for(self._returned.wait(), deadline - self._loop.time())
            except (TimeoutError, asyncio.TimeoutError):
                expected = f"one within {self.settings.patience:g} s"
                raise EngineUnavailableError("no engine replica serves", found=0, expected=expected) from None
        least = min(serving, key=lambda member: len(member.calls))
        known = self._affinity.find(question.prompt) if question and len(serving) > 1 else None
        if known in serving and len(known.calls) <= len(least.calls) + self.settings.stickiness:
            return known
        return least

    async def _on_any(self, work) -> Any:
        member = await self._choose(None)
        return await work(member)

    def _note(self, member: Member, error: EngineError) -> None:
        """Count a fault. A replica that is gone, or holds other weights, is out until it proves itself; the answer of
        one that reports an error, or answers nonsense, may be better the next time."""
        self.faults[type(error).__name__] += 1
        if not isinstance(error, EngineAnswerError):
            member.serving = False
            member.concern.set()

    async def _load(self, weights: Weights) -> None:
        async with self._changing:
            await asyncio.to_thread(check_publication, weights.directory, weights.version)
            self._gate.clear()
            try:
                await self._switch_all(weights)
            finally:
                self._affinity.forget()
                self._gate.set()
                self._returned.set()

    async def _switch_all(self, weights: Weights) -> None:
        candidates = [member for member in self._members if member.serving] or self._members
        errors = await self._try_each(candidates, weights, finish=self.settings.finish_calls)
        failed = [member for member, error in zip(candidates, errors, strict=True) if error]
        for member in failed:
            member.concern.set()
        if len(failed) < len(candidates):
            self._weights = weights
            return
        await self._try_each(candidates, self._weights, finish=False)
        first = errors[0]
        if isinstance(first, EngineVersionError):
            raise first
        raise EngineVersionError(
            "no engine replica took the new weights", file=weights.directory, found=first,
            expected=f"version {weights.version}; version {self._weights.version} serves on",
        ) from first  # fmt: skip

    async def _try_each(self, members: list[Member], weights: Weights, *, finish: bool) -> list[BaseException | None]:
        switches = [member.switch(weights, self.settings.max_k3, finish=finish) for member in members]
        results = await asyncio.gather(*switches, return_exceptions=True)
        for error in results:
            if error is not None and not isinstance(error, MegatronRLError):
                raise error
        return results

    async def _watch(self, member: Member) -> None:
        """Look at a replica every so often, and bring one back that does not serve."""
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(member.concern.wait(), self.settings.health_every)
            member.concern.clear()
            try:
                await self._look_after(member)
            except MegatronRLError as error:
                self.faults[type(error).__name__] += 1
                member.serving = False
                # Not at once again: whoever is concerned would only hear the same.
                await asyncio.sleep(self.settings.health_every)
            if member.serving:
                self._returned.set()

    async def _look_after(self, member: Member) -> None:
        # Asked without the lock: a dead server would hold up everybody's update.
        as_proven = await member.is_as_proven(self._weights)
        if as_proven and member.serving:
            return
        async with self._changing:
            if await member.is_as_proven(self._weights):
                await member.prove(self._weights, self.settings.max_k3)
            else:
                await member.switch(self._weights, self.settings.max_k3)

    async def _close(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await _gather([member.close() for member in self._members])
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _gather(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order; the first error ends the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
