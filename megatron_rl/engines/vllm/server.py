"""vLLM servers on this host: their command line, and processes that are started, restarted and stopped.

    python -m megatron_rl.engines.vllm.server MODEL --port 8000 -- --tensor-parallel-size 4

becomes a server with every option that the trainer needs; what follows ``--`` is passed on to vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from megatron_rl.engines.vllm import parent_watch
from megatron_rl.engines.vllm.options import VllmOptions, vllm_environment
from megatron_rl.errors import LaunchError

SERVED_NAME = "policy"
"""A server's name of its model."""
STEADY_SECONDS = 600.0
"""A server that ran for so long may again be restarted as often as at first."""
_LOG_LINES = 15
"""Of a server's log, shown in errors."""


def serve_command(options: VllmOptions, port: int, *, host: str = "127.0.0.1") -> list[str]:
    """The command of one server process, with a new fingerprint each time (`http_replica.HttpReplica` compares it)."""
    # `vllm serve` fails in builds for CPUs; this module starts the same server.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    address = ["--host", host, "--port", str(port), "--served-model-name", SERVED_NAME]
    fingerprint = ["--fingerprint-mode", "custom", "--fingerprint-value", uuid.uuid4().hex]
    return [*program, *address, *fingerprint, *options.command_line()]


def server_environment() -> dict[str, str]:
    """Environment variables of a server, whose workers must be able to import this package."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | vllm_environment() | {"PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """A TCP port of this host that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalServer:
    """One server process in its own process group; a context manager that stops it. It ends when this process ends.

    Args:
        options: model, sizes and features.
        log: file that its output is appended to.
        port: None: a free one.
        start_timeout: seconds until it must answer.
        environment: environment variables beyond this process's.
    """

    def __init__(
        self,
        options: VllmOptions,
        log: Path,
        *,
        port: int | None = None,
        start_timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.options, self.log, self.port = options, log, port or free_port()
        self._environment = dict(environment or {})
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may not answer yet."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> LocalServer:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, also in place of one that has ended. Does not wait."""
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = _start(serve_command(self.options, self.port), log, self._environment)

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            LaunchError: it ended, or does not answer in time; shows the last lines of its log.
        """
        deadline = time.monotonic() + self._start_timeout
        while not self._answers():
            if not self.alive:
                raise self._failed("the vLLM server ended while starting", self._process and self._process.returncode)
            if time.monotonic() > deadline:
                raise self._failed(f"the vLLM server did not answer within {self._start_timeout:g} s", "no answer")
            time.sleep(0.2)

    def stop(self, grace: float = 10.0) -> None:
        """End the process group.

        Args:
            grace: seconds between SIGTERM and SIGKILL.
        """
        if self._process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(grace)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill the process group without grace, as a crash would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _failed(self, what: str, found: object) -> LaunchError:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if self.log.exists() else []
        return LaunchError(what, file=self.log, found="\n".join([str(found), *lines]), expected=f"{self.url}/health")


def serve_with_restarts(arguments: Sequence[str], restarts: int) -> int:
    """Run a server, and start it again when it ends, until this process gets SIGTERM.

    Args:
        arguments: see `command_of`.
        restarts: most restarts in a row; a server that ran for `STEADY_SECONDS` resets the count.

    Returns:
        Exit status: the last server's, 0 after SIGTERM.
    """
    stopping = False
    running: list[subprocess.Popen[bytes]] = []
    left = restarts

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        for process in running:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    while True:
        began = time.monotonic()
        running[:] = [process := _start(command_of(arguments))]
        if stopping:
            process.terminate()
        status = process.wait()
        # The engine's processes would outlive a server that was killed, and keep its memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        left = restarts if time.monotonic() - began > STEADY_SECONDS else left
        if stopping or not left:
            return 0 if stopping else status
        left -= 1
        print(f"the server ended with status {status}: started again, {left} more times at most", flush=True)


def _start(
    command: Sequence[str], output: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, which ends when this process ends."""
    return subprocess.Popen(
        [sys.executable, parent_watch.__file__, *command], stdin=subprocess.PIPE, stdout=output, stderr=output,
        env=server_environment() | dict(environment or {}), start_new_session=True,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: become a server, or with ``--restarts`` run one."""
    words = sys.argv[1:] if arguments is None else arguments
    if restarts := _parsed(words)[0].restarts:
        sys.exit(serve_with_restarts(words, restarts))
    command = command_of(words)
    os.execve(command[0], command, server_environment())


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command of a server.

    Args:
        arguments: of this module's command line.
    """
    chosen, others = _parsed(arguments)
    options = VllmOptions(
        chosen.model, dtype=chosen.dtype, tensor_parallel=chosen.tensor_parallel, data_parallel=chosen.data_parallel
    )
    return [*serve_command(options, chosen.port, host=chosen.host), *others]


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the words after ``--`` for vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.engines.vllm.server", description="A vLLM server.",
        epilog="Options after a separate -- are passed on to vLLM and override these.",
    )  # fmt: skip
    parser.add_argument("model", type=Path, help="HF checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, keys and values")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one engine copy")
    parser.add_argument("--data-parallel", type=int, default=1, help="engine copies behind this address")
    parser.add_argument("--restarts", type=int, default=0, help="most restarts in a row when it ends")
    # Split here: argparse refuses words after -- where options stand between them and the model.
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    chosen = parser.parse_args(words[:end])
    if chosen.restarts < 0:
        parser.error(f"--restarts: found {chosen.restarts}, expected 0 or more (MRL_SERVER_RESTARTS in a SLURM job)")
    return chosen, words[end + 1 :]


if __name__ == "__main__":
    main()
