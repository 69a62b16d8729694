"""vLLM inside this process, as a replica: one thread owns the engine, steps it, and runs commands between steps.

Not for a process that shares a process group with others that `torchrun` or `srun` started: there vLLM hangs while it
starts. The rollout process is started alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_rl.engines.vllm.completion import Completion, CompletionRequest
from megatron_rl.engines.vllm.http_replica import differences, used_bytes
from megatron_rl.engines.vllm.options import SLEEP_LEVEL, VllmOptions, vllm_environment
from megatron_rl.engines.vllm.replica import Description, Footprint
from megatron_rl.errors import EngineError, EngineUnavailableError, MegatronRLError

# Read by vllm when it is first imported: the engine is not to start processes of its own.
os.environ.update(vllm_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

import vllm  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402

Command = Callable[[], Any]


class InProcessReplica:
    """One vLLM engine of this process.

    Args:
        options: model, sizes and features.

    Raises:
        EngineError: vLLM does not start.
    """

    def __init__(self, options: VllmOptions) -> None:
        self.name = f"vllm:{options.model}"
        self._commands: queue.SimpleQueue[tuple[Command, Future] | None] = queue.SimpleQueue()
        self._running: dict[str, Future] = {}
        self._held_back: dict[str, Command] = {}
        self._ids = (str(number) for number in itertools.count())
        self._paused, self._tag = False, ""
        try:
            self._llm = vllm.LLM(**options.arguments())
        except Exception as error:
            raise EngineError("vLLM does not start", file=options.model, found=error) from error
        self._engine = self._llm.llm_engine
        self._thread = threading.Thread(target=self._work, name="vllm-engine", daemon=True)
        self._thread.start()

    async def complete(self, request: CompletionRequest, temperature: float) -> Completion:
        """See `Replica`."""
        output = await self._sample(
            request.prompt,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_tokens),
            temperature=0.0 if request.greedy else temperature,
        )
        found = output.outputs[0]
        logprobs = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
        return Completion(list(found.token_ids), logprobs, found.finish_reason, found.routed_experts)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `Replica`."""
        output = await self._sample(tokens, max_tokens=1, temperature=1.0, prompt_logprobs=0)
        entries = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        return [0.0, *(entry[token].logprob for entry, token in entries)]

    async def describe(self) -> Description:
        """See `Replica`."""
        states = await self._do(lambda: self._llm.collective_rpc("device_state"))
        can_sleep = all(state["can_sleep"] for state in states)
        return Description(vllm.__version__, self._engine.model_config.max_model_len, can_sleep)

    async def tag(self) -> str:
        """See `Replica`."""
        return self._tag

    async def set_tag(self, tag: str) -> None:
        """See `Replica`."""
        self._tag = tag

    async def pause(self) -> None:
        """See `Replica`."""
        await self._do(self._interrupt)

    async def resume(self) -> None:
        """See `Replica`."""
        await self._do(self._release)

    async def load(self, directory: Path, tag: str) -> None:
        """See `Replica`."""

        def change() -> None:
            self._llm.collective_rpc("load_directory", kwargs={"path": str(directory)})
            if not self._llm.reset_prefix_cache():
                raise EngineError("stored prefixes of old weights are still in use", file=self.name)

        await self._do(change)
        self._tag = tag

    async def differing(self, directory: Path) -> list[str]:
        """See `Replica`."""
        call = {"path": str(directory)}
        found = await self._do(lambda: self._llm.collective_rpc("differing_parameters", kwargs=call))
        return differences(found, self.name)

    async def sleep(self) -> Footprint:
        """See `Replica`."""

        def release() -> Footprint:
            awake = used_bytes(self._llm.collective_rpc("device_state"))
            self._llm.sleep(level=SLEEP_LEVEL)
            self._llm.collective_rpc("release_memory")
            return Footprint(awake, used_bytes(self._llm.collective_rpc("device_state")))

        return await self._do(release)

    async def wake(self) -> None:
        """See `Replica`."""

        def restore() -> None:
            self._llm.collective_rpc("restore_memory")
            if self._engine.is_sleeping():
                self._llm.wake_up()

        await self._do(restore)

    async def is_sleeping(self) -> bool:
        """See `Replica`."""
        return await self._do(self._engine.is_sleeping)

    async def reseed(self, seed: int) -> None:
        """See `Replica`."""
        await self._do(lambda: self._llm.collective_rpc("reseed", kwargs={"seed": str(seed)}))

    async def close(self) -> None:
        """See `Replica`. Ends the thread, and with it every call."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _do(self, command: Command) -> Any:
        """Run a command between two steps of the engine."""
        done: Future = Future()
        self._commands.put((command, done))
        try:
            return await asyncio.wrap_future(done)
        except MegatronRLError:
            raise
        except Exception as error:
            raise EngineError("vLLM fails", file=self.name, found=repr(error)) from error

    async def _sample(self, prompt: Sequence[int], **parameters: Any) -> Any:
        """The finished output of one request."""
        parameters = {"logprobs": 0, "ignore_eos": True, "detokenize": False, "top_p": 1.0, "top_k": 0} | parameters
        sampling = vllm.SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **parameters)
        name = next(self._ids)
        done: Future = Future()
        add = lambda: self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)  # noqa: E731
        await self._do(lambda: self._admit(name, add, done))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._commands.put((lambda: self._cancel(name), Future()))
            raise

    def _admit(self, name: str, add: Command, done: Future) -> None:
        if self._paused:
            self._held_back[name] = add
        else:
            add()
        self._running[name] = done

    def _cancel(self, name: str) -> None:
        if self._running.pop(name, None) and not self._held_back.pop(name, None):
            self._engine.abort_request([name])

    def _interrupt(self) -> None:
        """End running requests with the tokens they have so far, which `abort_request` alone would drop."""
        self._paused = True
        states = self._engine.output_processor.request_states
        for name, state in [(state.external_req_id, state) for state in states.values()]:
            output = state.make_request_output([], None, FinishReason.ABORT, None, None, None)
            self._engine.abort_request([name])
            self._finish(name, output)

    def _release(self) -> None:
        self._paused = False
        for name in list(self._held_back):
            self._held_back.pop(name)()

    def _finish(self, name: str, output: Any) -> None:
        done = self._running.pop(name, None)
        if done is not None and not done.cancelled():
            done.set_result(output)

    def _work(self) -> None:
        """Main function of the engine's thread."""
        while self._run_commands():
            try:
                outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
            except Exception as error:
                self._fail(EngineUnavailableError("vLLM fails", file=self.name, found=repr(error)))
                continue
            for output in outputs:
                if output.finished:
                    self._finish(output.request_id, output)
        self._fail(EngineUnavailableError("the engine was closed", file=self.name))

    def _run_commands(self) -> bool:
        """Run queued commands, waiting for one while there is nothing to sample; returns whether to go on."""
        while not self._commands.empty() or not self._engine.has_unfinished_requests():
            item = self._commands.get()
            if item is None:
                return False
            command, done = item
            try:
                result = command()
            except Exception as error:
                done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)
        return True

    def _fail(self, error: EngineError) -> None:
        while self._running:
            _, done = self._running.popitem()
            if not done.cancelled():
                done.set_exception(error)
