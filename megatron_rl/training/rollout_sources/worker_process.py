"""The trainer's own rollout worker: a process that rank 0 starts, and that ends with it.

The process holds one end of a pipe and ends when the other closes, whatever closed it. It leads a process group of its
own, so that what it started (an engine's workers) is ended with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import megatron_rl
from megatron_rl.config import RunConfig
from megatron_rl.errors import LaunchError
from megatron_rl.run_dir.exchange import Exchange

LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""And everything that begins with TORCHELASTIC or TORCH_NCCL: an engine would join the trainer's group by them."""
GRACE_SECONDS = 30.0
_TAIL = 2000


class WorkerProcess:
    """`megatron-rl rollout` with this run's configuration.

    Args:
        config: the run.
        exchange: its files; log and configuration of the process lie among them.
    """

    def __init__(self, config: RunConfig, exchange: Exchange) -> None:
        self._exchange, self._restarts_left = exchange, config.rollout.restarts
        folder = exchange.output / "exchange"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = exchange.output / "rollout.log"
        self._config = folder / "rollout.yaml"
        self._config.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        self._start()

    def restart_if_dead(self) -> bool:
        """Start the process again if it died; returns whether it did.

        Raises:
            LaunchError: it died too often; with the end of its log.
        """
        status = self.process.poll()
        if status is None or status == 0:
            return False
        if not self._restarts_left:
            raise LaunchError(
                f"the rollout process died (exit status {status}): {self._tail()}", file=self.log,
                setting="rollout.restarts",
            )  # fmt: skip
        self._restarts_left -= 1
        logging.getLogger(__name__).warning("rollout process died (exit status %d) and is started again", status)
        self._end_group()
        self._start()
        return True

    def close(self, *, wait: bool) -> None:
        """End the process and all it started. `wait`: give it time to end by itself first."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS if wait else GRACE_SECONDS / 3)
        self._end_group()

    def _start(self) -> None:
        self._exchange.forget_heartbeat()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "TORCH_NCCL"))}
        environment = {name: value for name, value in kept.items() if name not in LAUNCHER_VARIABLES}
        root = str(Path(megatron_rl.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "megatron_rl.cli", "rollout", str(self._config), "--end-with-stdin"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _end_group(self) -> None:
        # The group outlives its leader where a worker hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
