"""A request to stop, from SLURM's warning before a time limit or from an operator: finish the step at hand, save, end.

    SIGUSR1, SIGTERM, SIGINT → flag of this rank → agreed between ranks at the next step → checkpoint → exit STOPPED

Signals reach ranks at different moments; whatever one rank acts upon, all must. `agreed` is that agreement.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from megatron_rl.backend import platform

STOPPED = 85
"""Exit status of a run that was asked to stop, has saved, and wants to be started again."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Raised on every rank to leave work that is to be done again after the restart."""


class StopRequest:
    """Whether this run was asked to stop."""

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the signal that this rank received, or None."""

    def request(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask to stop; has the form of a signal handler.

        Raises:
            KeyboardInterrupt: SIGINT came a second time: whoever presses Ctrl-C twice does not want to wait.
        """
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @property
    def here(self) -> bool:
        """Whether this rank was asked: for work that a rank can leave on its own, like playing its episodes."""
        return self.received is not None

    def agreed(self) -> bool:
        """Whether any rank was asked. Collective: one small reduction, the same answer on every rank."""
        flag = torch.tensor([float(self.here)], device=platform.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """A request that SIGUSR1, SIGTERM and SIGINT make; the handlers that were there come back at the end."""
    stop = StopRequest()
    before = {number: signal.signal(number, stop.request) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
