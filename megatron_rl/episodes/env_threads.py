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
    """An environment did not answer in time."""


@dataclass(frozen=True)
class Returned:
    """What a call came to.

    An exception is handed over, not raised: from a thread it may be one that means something else to an event loop
    (a time-out, a cancellation, the end of an iterator, an exit).
    """

    value: Any = None
    error: BaseException | None = None


class CallThreads:
    """Daemon threads that make blocking calls, at most `size` at a time.

    Python cannot end a thread. One whose call outlasts its time is given up: another takes its place, and it ends by
    itself should the call ever return. Being a daemon it does not keep the process alive.

    Args:
        size: calls at a time.
        max_stuck: threads that may be given up and not have returned.
    """

    def __init__(self, size: int, max_stuck: int) -> None:
        self._room, self._max_stuck = asyncio.Semaphore(size), max_stuck
        self._idle: list[_Worker] = []
        self.stuck = 0

    async def call(
        self, function: Callable[[], Any], seconds: float | None, give_up: Callable[[], Callable[[], Any]] | None = None
    ) -> Returned:
        """Call `function()` in some thread. Waiting for a free thread does not count as the call's time.

        Args:
            give_up: called if this task stops waiting for the call, timed out or cancelled. The thread, should the call
                ever return, then calls what `give_up` returned.

        Returns:
            Its result or exception; `EnvironmentHang` as the exception after `seconds`.

        Raises:
            RolloutError: more than `max_stuck` threads have been given up.
        """
        async with self._room:
            worker = self._idle.pop() if self._idle else _Worker()
            answer: asyncio.Future[Returned] = asyncio.get_running_loop().create_future()
            worker.inbox.put((function, answer))
            try:
                await asyncio.wait({answer}, timeout=seconds)
            finally:
                if answer.done():
                    self._idle.append(worker)
                else:
                    self._leave(worker, answer, give_up)
            if answer.done():
                return answer.result()
        if self.stuck > self._max_stuck:
            raise RolloutError(
                "environment calls do not return", field="threads", found=f"{self.stuck} given up",
                expected=f"at most {self._max_stuck}", setting="environment_seconds, max_stuck_environments",
            )  # fmt: skip
        return Returned(error=EnvironmentHang(f"no answer within {seconds} s"))

    def close(self) -> None:
        """End the idle threads."""
        for worker in self._idle:
            worker.inbox.put(None)
        self._idle.clear()

    def _leave(self, worker: _Worker, answer: asyncio.Future[Returned], give_up: Callable | None) -> None:
        self.stuck += 1
        answer.add_done_callback(self._came_back)
        if give_up is not None:
            worker.inbox.put((give_up(), answer))
        worker.inbox.put(None)

    def _came_back(self, _answer: asyncio.Future[Returned]) -> None:
        self.stuck -= 1


class _Worker(threading.Thread):
    """Makes the calls in its inbox until it finds None."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="environment")
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Returned]] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.inbox.get()) is not None:
            function, answer = job
            try:
                returned = Returned(function())
            except BaseException as error:  # also an exit that an environment asks for
                returned = Returned(error=error)
            with suppress(RuntimeError):  # the event loop may be gone by now
                answer.get_loop().call_soon_threadsafe(_settle, answer, returned)
            del job, function, answer, returned  # an idle thread must not keep an environment alive


def _settle(answer: asyncio.Future[Returned], returned: Returned) -> None:
    if not answer.done():
        answer.set_result(returned)
