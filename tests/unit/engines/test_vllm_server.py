"""Server processes: their command line, and that none outlives its parent. No vLLM is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.engines.vllm import parent_watch
from megatron_rl.engines.vllm import server as servers
from megatron_rl.engines.vllm.options import TRANSFER_BACKEND, VllmOptions
from megatron_rl.engines.vllm.server import LocalServer, command_of, free_port, serve_command
from megatron_rl.errors import LaunchError
from tests.waiting import wait_until


def gone(pid: int) -> bool:
    """Whether a process has ended (killed is not gone at once)."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_command_switches_on_what_the_trainer_needs() -> None:
    words = serve_command(VllmOptions("m", kv_cache_bytes=8, extra={"max_model_len": 64}), 81)
    options = dict(zip(words, words[1:], strict=False))
    assert (
        options["--port"] == "81"
        and options["--max-model-len"] == "64"
        and options["--logprobs-mode"] == "processed_logprobs"
    )
    assert "--enable-return-routed-experts" in words and options["--generation-config"] == "vllm"
    assert json.loads(options["--weight-transfer-config"]) == {"backend": TRANSFER_BACKEND}
    assert "--no-enable-return-routed-experts" in VllmOptions("m", routes=False).command_line()
    assert serve_command(VllmOptions("m"), 81) != serve_command(VllmOptions("m"), 81), (
        "each process has a fingerprint of its own"
    )


def test_options_after_two_dashes_go_to_vllm_and_override() -> None:
    words = command_of(["m", "--host", "0.0.0.0", "--port", "81", "--", "--dtype", "float32", "--max-num-seqs", "16"])
    assert words[-4:] == ["--dtype", "float32", "--max-num-seqs", "16"] and words.index("--dtype") < len(words) - 4
    assert words[words.index("--host") + 1] == "0.0.0.0" and words[words.index("--model") + 1] == "m"
    assert command_of(["m"])[-1] != "--"


def test_restarts_are_counted_from_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_of(["m", "--restarts", "-1"])
    assert "--restarts: found -1, expected 0 or more" in capsys.readouterr().err


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so that it cannot end its child itself."""
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {parent_watch.__file__!r}, sys.executable, '-c', {child!r}],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(int(pid_file.read_text()))


RESTARTING = """
import sys
from megatron_rl.engines.vllm import server
server.serve_command = lambda *_, **__: [sys.executable, "-c", {script!r}]
server.STEADY_SECONDS = {steady}
server.main(["m", "--restarts", "2"])
"""


def restarting_server(script: str, log: Path, steady: float = 600.0) -> subprocess.Popen[bytes]:
    """A process that runs this script as its server, and restarts it."""
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-c", RESTARTING.format(script=script, steady=steady)], stdout=output)


def wait_for_lines(log: Path, count: int) -> list[str]:
    wait_until(lambda: len(log.read_text().splitlines()) >= count, 60, what=log)
    return log.read_text().splitlines()


def test_a_server_is_restarted_so_often_in_a_row(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert restarting_server("import sys; print('up', flush=True); sys.exit(7)", log).wait(60) == 7
    assert log.read_text().count("up\n") == 3 and log.read_text().count("ended with status 7") == 2
    log.unlink()
    steady = restarting_server("import sys; print('up', flush=True); sys.exit(7)", log, steady=0.0)
    wait_for_lines(log, 12)
    steady.kill()


def test_a_restarting_server_leaves_no_process_behind(tmp_path: Path) -> None:
    """A server with children of its own is killed; then the process that restarts it is terminated, or killed too."""
    log, engine = tmp_path / "log", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {engine!r}])"
    process = restarting_server(script, log)
    first = int(wait_for_lines(log, 1)[0])
    os.kill(int(Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    *_, second = wait_for_lines(log, 3)
    assert gone(first)
    process.terminate()
    assert process.wait(30) == 0 and gone(int(second)) and len(log.read_text().splitlines()) == 3
    process = restarting_server(script, log)
    *_, third = wait_for_lines(log, 4)
    process.kill()
    process.wait()
    assert gone(int(third))


def test_server_that_ends_while_starting_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('no such model'); sys.exit(3)"
    monkeypatch.setattr(servers, "serve_command", lambda *_: [sys.executable, "-c", script])
    with (
        pytest.raises(LaunchError, match="(?s)ended while starting.*no such model"),
        LocalServer(VllmOptions("m"), tmp_path / "logs" / "server.log"),
    ):
        pass


def test_server_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(servers, "serve_command", lambda *_: [sys.executable, "-c", script])
    server = LocalServer(VllmOptions("m"), tmp_path / "server.log", start_timeout=1.0)
    server.start()
    with pytest.raises(LaunchError, match="did not answer within 1 s"):
        server.wait()
    server.stop(grace=0.5)
    assert not server.alive and gone(int((tmp_path / "server.log").read_text()))


def test_free_ports_are_free() -> None:
    assert free_port() > 0
