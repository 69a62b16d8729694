"""Whether a rollout worker is alive, judged by its heartbeat file alone: it may run anywhere."""

from __future__ import annotations

import logging
import shutil
import time

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import LaunchError
from megatron_rl.run_dir.exchange import Exchange, Heartbeat

REPORT_SECONDS = 30.0
_log = logging.getLogger(__name__)


class HeartbeatMonitor:
    """Watches one heartbeat file. Only that it changes counts, timed by this process's clock: clocks may differ.

    Args:
        exchange: the run's files.
        rollout: time-outs.
    """

    def __init__(self, exchange: Exchange, rollout: RolloutConfig) -> None:
        self._exchange, self._rollout = exchange, rollout
        self.expect_start()

    def expect_start(self) -> None:
        """A worker was just started: it has `start_timeout` seconds for its first heartbeat."""
        self._last = self._exchange.heartbeat()
        self._alive = False
        self._changed = time.monotonic()
        self.start_waiting()

    def start_waiting(self) -> None:
        """The caller begins to wait for something: REPORT_SECONDS count from here."""
        self._reported = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether the worker has ended and no trajectory will follow."""
        heartbeat, _ = self._exchange.heartbeat()
        return heartbeat is not None and heartbeat.state == "finished"

    def check(self, missing: str) -> None:
        """Read the heartbeat once; logs what is waited for every REPORT_SECONDS.

        Args:
            missing: what the caller waits for.

        Raises:
            LaunchError: the heartbeat has not changed for too long, or says that the worker failed.
        """
        now, latest = time.monotonic(), self._exchange.heartbeat()
        if latest != self._last:
            self._last, self._changed, self._alive = latest, now, True
        heartbeat = latest[0]
        if self._alive and heartbeat is not None and heartbeat.state == "failed":
            raise self._dead(missing, f"it failed: {heartbeat.problem}")
        # An engine that loads a large model may hold the process up for minutes.
        started = self._alive and heartbeat is not None and heartbeat.state != "starting"
        limit = self._rollout.heartbeat_timeout if started else self._rollout.start_timeout
        if now - self._changed > limit:
            raise self._dead(missing, f"no sign of life for {now - self._changed:.0f} s, last {_describe(heartbeat)}")
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            _log.warning("waiting for rollouts: %s; rollout process: %s", missing, _describe(heartbeat))

    def _dead(self, missing: str, found: str) -> LaunchError:
        free = shutil.disk_usage(self._exchange.output).free
        return LaunchError(
            f"no rollout process is alive, and {missing}",
            file=self._exchange.output,
            found=f"{found}; {free >> 20} MiB of disk are free",
            expected="a running `megatron-rl rollout` on this run directory",
            setting="rollout.external=false starts one here; rollout.heartbeat_timeout and rollout.start_timeout",
        )


def _describe(heartbeat: Heartbeat | None) -> str:
    if heartbeat is None:
        return "nothing heard yet"
    problem = f", {heartbeat.problem}" if heartbeat.problem else ""
    return f"{heartbeat.state} with version {heartbeat.version}, {heartbeat.recorded} recorded{problem}"
