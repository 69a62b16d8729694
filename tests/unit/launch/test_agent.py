"""torchrun that tells what its ranks said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import os, signal, sys, time
code, rank = sys.argv[1], int(os.environ["RANK"])
if code == "signal":
    # As SLURM does: everybody in the step gets the signal, the agent too.
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
    open(f"ready-{rank}", "w").close()
    while True:
        time.sleep(0.05)
if code == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code) if code.isdigit() else 0)
"""


def start(tmp_path: Path, code: str) -> subprocess.Popen:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "megatron_rl.launch.agent", "--standalone", "--nproc-per-node=2", "rank.py", code]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("85", 85), ("kill", 137)])
def test_exit_status_is_that_of_the_ranks(code: str, status: int, tmp_path: Path) -> None:
    process = start(tmp_path, code)
    process.communicate(timeout=120)
    assert process.returncode == status


def test_a_signal_to_the_whole_step_stops_ranks_and_not_the_agent(tmp_path: Path) -> None:
    process = start(tmp_path, "signal")
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, signal.SIGUSR1)
    for rank in children(process.pid):
        os.kill(rank, signal.SIGUSR1)
    process.communicate(timeout=120)
    assert process.returncode == 85


def children(parent: int) -> list[int]:
    """Ranks live in sessions of their own, so the group does not reach them."""
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
