"""Starting and ending a rollout process: its lock, its engine, its signals, and its last heartbeat."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.environments.base import Task
from megatron_rl.environments.tasks import make_task
from megatron_rl.errors import ConfigError, LaunchError
from megatron_rl.rollout_worker.engines import start_engine
from megatron_rl.rollout_worker.worker import RolloutWorker, newest_weights
from megatron_rl.run_dir.exchange import Exchange, Heartbeat
from megatron_rl.run_dir.lock import run_lock

POLL_SECONDS = 0.2
ORPHAN_SECONDS = 10.0
"""What a process whose starter has died may take to end by itself."""


def run_rollout_worker(
    config: RunConfig, *, limit: int | None = None, weights: Path | None = None, end_with_stdin: bool = False
) -> None:
    """Play until the trainer of the run is done.

    Args:
        config: the run, the same as the trainer's.
        limit: most episodes ever recorded; the trainer's data end there.
        weights: play with this HF directory as version 0, and without a trainer; needs a limit.
        end_with_stdin: end when standard input closes, which means that the starter has ended.

    Raises:
        ConfigError: weights without a limit: such a run would never end.
        LaunchError: another rollout process plays for this run, or the trainer has published no weights for
            `rollout.trainer_timeout`, or see `RolloutWorker.run`.
        EngineError, RolloutError: see `start_engine` and `RolloutWorker.run`. The last heartbeat carries every error.
    """
    if weights is not None and limit is None:
        raise ConfigError("playing without a trainer needs an end", setting="--episodes")
    exchange = Exchange(Path(config.output))
    task = make_task(config.rollout.environment, config.rollout.environment_options)
    # A lock of its own, beside the trainer's.
    with run_lock(exchange.output / "exchange", first=True):
        _write_heartbeat(exchange, "starting")
        try:
            asyncio.run(_main(_play(config, exchange, task, limit, weights), end_with_stdin))
        except _Ended:
            return
        except Exception as error:
            _write_heartbeat(exchange, "failed", f"{type(error).__name__}: {error}")
            raise


class _Ended(Exception):
    """Asked to end by a signal."""


async def _main(playing: Coroutine[Any, Any, None], end_with_stdin: bool) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    if end_with_stdin:
        threading.Thread(target=_end_when_orphaned, daemon=True).start()
    work, stop = asyncio.create_task(playing), asyncio.create_task(ended.wait())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise _Ended
    stop.cancel()
    work.result()


async def _play(config: RunConfig, exchange: Exchange, task: Task, limit: int | None, weights: Path | None) -> None:
    version, directory = await _first_weights(config, exchange) if weights is None else (0, weights)
    engine = await start_engine(config, directory, version)
    try:
        await RolloutWorker(config, task, engine, limit, alone=weights is not None).run()
    finally:
        await engine.close()


async def _first_weights(config: RunConfig, exchange: Exchange) -> tuple[int, Path]:
    """Wait until the trainer has published weights; returns the newest version and its directory."""
    start, limit = time.monotonic(), config.rollout.trainer_timeout
    while (found := newest_weights(exchange)) is None:
        if limit and time.monotonic() - start > limit:
            raise LaunchError(
                "the trainer has published no weights", file=exchange.weights, found=f"none for {limit:g} s",
                expected="weights/version-NNNNNN", setting="rollout.trainer_timeout, or output",
            )  # fmt: skip
        _write_heartbeat(exchange, "starting")
        await asyncio.sleep(POLL_SECONDS)
    return found


def _write_heartbeat(exchange: Exchange, state: str, problem: str = "") -> None:
    exchange.write_heartbeat(Heartbeat(time.time_ns(), state, -1, 0, problem))


def _end_when_orphaned() -> None:
    logging.getLogger(__name__).debug("standard input closed: %r", sys.stdin.buffer.read())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    # Still here, so it hangs: end it with everything that it started.
    os.killpg(os.getpgrp(), signal.SIGKILL)
