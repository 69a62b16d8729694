"""Environment calls beside the event loop: a call that hangs costs a thread, never the others' time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import RolloutError


class EnvironmentHang(Exception):
    """An environment did not return in time."""


@dataclass(frozen=True)
class CallResult:
    """What a call returned or raised.

    An exception is passed on as a value: raised from a thread it may be one that means something else to an event loop
    (a time-out, a cancellation, the end of an iterator, an exit).
    """

    value: Any = None
    error: BaseException | None = None


class CallThreads:
    """Daemon threads that make blocking calls, at most `size` at a time.

    Python cannot end a thread. One whose call exceeds its time is abandoned: another takes over, and it ends by itself
    should the call ever return. Being a daemon it does not keep the process alive.

    Args:
        size: calls at a time.
        max_stuck: abandoned threads whose call has not returned.
    """

    def __init__(self, size: int, max_stuck: int) -> None:
        self._free, self._max_stuck = asyncio.Semaphore(size), max_stuck
        self._idle: list[_Worker] = []
        self.stuck = 0

    async def call(
        self,
        function: Callable[[], Any],
        seconds: float | None,
        on_abandon: Callable[[], Callable[[], Any]] | None = None,
    ) -> CallResult:
        """Call `function()` in some thread. Waiting for a free thread does not count as the call's time.

        Args:
            function: the blocking call.
            seconds: time limit; None: none.
            on_abandon: called if this task stops waiting for the call, timed out or cancelled. The thread, should the
                call ever return, then calls what `on_abandon` returned.

        Returns:
            Its result or exception; `EnvironmentHang` as the exception after `seconds`.

        Raises:
            RolloutError: more than `max_stuck` abandoned threads have not returned.
        """
        async with self._free:
            worker = self._idle.pop() if self._idle else _Worker()
            result: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
            worker.inbox.put((function, result))
            try:
                await asyncio.wait({result}, timeout=seconds)
            finally:
                if result.done():
                    self._idle.append(worker)
                else:
                    self._abandon(worker, result, on_abandon)
            if result.done():
                return result.result()
        if self.stuck > self._max_stuck:
            raise RolloutError(
                "environment calls do not return", field="max_stuck_environments",
                found=f"{self.stuck} threads abandoned", expected=f"at most {self._max_stuck}",
                setting="rollout.step_timeout, if the calls are only slow",
            )  # fmt: skip
        return CallResult(error=EnvironmentHang(f"no answer within {seconds} s"))

    def close(self) -> None:
        """End the idle threads."""
        for worker in self._idle:
            worker.inbox.put(None)
        self._idle.clear()

    def _abandon(self, worker: _Worker, result: asyncio.Future[CallResult], on_abandon: Callable | None) -> None:
        self.stuck += 1
        result.add_done_callback(self._returned)
        if on_abandon is not None:
            worker.inbox.put((on_abandon(), result))
        worker.inbox.put(None)

    def _returned(self, _result: asyncio.Future[CallResult]) -> None:
        self.stuck -= 1


class _Worker(threading.Thread):
    """Makes the calls in its inbox until it finds None."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="environment")
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[CallResult]] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.inbox.get()) is not None:
            function, future = job
            try:
                result = CallResult(function())
            except BaseException as error:  # also SystemExit, raised by an environment
                result = CallResult(error=error)
            with suppress(RuntimeError):  # the event loop may be closed by now
                future.get_loop().call_soon_threadsafe(_settle, future, result)
            del job, function, future, result  # an idle thread must not keep an environment alive


def _settle(future: asyncio.Future[CallResult], result: CallResult) -> None:
    if not future.done():
        future.set_result(result)
