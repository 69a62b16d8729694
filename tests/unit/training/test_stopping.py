"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_rl.training.stopping import SIGNALS, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_once_and_the_old_handler_comes_back(number: int) -> None:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    with stop_on_signals() as stop:
        assert not stop.here
        os.kill(os.getpid(), number)
        assert stop.here and stop.received == number
    assert {each: signal.getsignal(each) for each in SIGNALS} == before


def test_a_second_interrupt_ends_at_once() -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
