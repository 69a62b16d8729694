"""Several servers of this host, started together and restarted when they end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from megatron_rl.engines.vllm.options import VllmOptions
from megatron_rl.engines.vllm.server import LocalServer
from megatron_rl.errors import LaunchError


class ServerGroup:
    """A context manager: all servers answer when it is entered, and all have ended when it is left.

    A server that ends is started again on its port with the weights of `options`; `VllmEngine` updates it before it
    serves. GPUs are assigned by `CUDA_VISIBLE_DEVICES` in `environments`.

    Args:
        options: model, sizes and features of each server.
        logs: folder of `server-N.log`, appended to.
        environments: environment variables of each server beyond this process's; one server for each.
        max_restarts: of each server in all, after which it stays down.
        start_timeout: seconds until all must answer.

    Raises:
        LaunchError: on entering, a server did not start.
    """

    def __init__(
        self,
        options: VllmOptions,
        logs: Path,
        environments: Sequence[dict[str, str]],
        *,
        max_restarts: int = 3,
        start_timeout: float = 600.0,
    ) -> None:
        self.servers = [
            LocalServer(options, logs / f"server-{i}.log", start_timeout=start_timeout, environment=environment)
            for i, environment in enumerate(environments)
        ]
        self.restarts = [0] * len(self.servers)
        """So far, of each server."""
        self._max_restarts = max_restarts
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._restart_ended, name="vllm-restarts", daemon=True)

    def __enter__(self) -> ServerGroup:
        for server in self.servers:
            server.start()
        try:
            for server in self.servers:
                server.wait()
            self._thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def urls(self) -> list[str]:
        """Addresses, for `http_replica.HttpReplica`."""
        return [server.url for server in self.servers]

    def check(self) -> None:
        """Raise if a server is down for good.

        Raises:
            LaunchError: it ended more often than it may be restarted.
        """
        for server, restarts in zip(self.servers, self.restarts, strict=True):
            if not server.alive and restarts >= self._max_restarts:
                raise LaunchError(
                    "a vLLM server keeps ending", file=server.log, found=f"{restarts} restarts",
                    expected="a server that stays up",
                )  # fmt: skip

    def _restart_ended(self) -> None:
        while not self._ended.wait(0.5):
            for i, server in enumerate(self.servers):
                if not server.alive and self.restarts[i] < self._max_restarts:
                    self.restarts[i] += 1
                    server.start()

    def _end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for server in self.servers:
            server.stop()
