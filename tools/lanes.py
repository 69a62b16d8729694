"""The checks of this repository, each a lane with its share of minutes.

    python tools/lanes.py                # every lane of DEFAULT, then a table of seconds
    python tools/lanes.py unit dist      # only these

A lane that fails does not keep the others from running (except `setup`, without which nothing runs). A lane is stopped
when it takes twice its share. A lane whose folders hold no tests fails and says so. The exit status is 1 if any lane
did not pass. Standard library only, because the first lane installs everything else.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "{python}"
PASSED, NO_TESTS = "passed", "no tests"
PYTEST_FOUND_NOTHING = 5
GRACE_SECONDS = 10


@dataclass(frozen=True)
class Lane:
    """One check."""

    name: str
    minutes: float
    """Share of the whole run; the lane is stopped at twice as much."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Run in order until one fails; `PYTHON` stands for the environment's interpreter."""
    folders: tuple[str, ...] = ()
    """Test folders given to pytest, after `commands`."""
    select: str = "not full"
    """pytest's marker expression."""
    lock: str = ""
    """Lock file of an environment of its own, made by `commands`; the lane runs in it."""


DEMO_SMOKE = (
    "--output", "runs/smoke", "--iterations", "3", "--episodes", "32", "--evaluation", "32", "--demonstrations", "64",
    "--warm-epochs", "1",
)  # fmt: skip
"""Every stage of the demo, too short to learn."""

LINT = (
    (PYTHON, "-m", "ruff", "check", "."),
    (PYTHON, "-m", "ruff", "format", "--check", "."),
    (PYTHON, "-m", "mypy"),
)
"""The hooks of `.pre-commit-config.yaml` are these."""

SLURM_INSTALL = (("bash", "tests/slurm/install.sh"),)
VLLM_LOCK = "requirements/lock-vllm-py311.txt"
VLLM_INSTALL = (("make", "--no-print-directory", "setup-vllm"),)

LANES = (
    Lane("setup", 5, (("make", "--no-print-directory", "setup"),)),
    Lane("lint", 2, LINT),
    Lane("unit", 4, folders=("tests/unit", "tests/gpu")),
    Lane("dist", 8, folders=("tests/dist",)),
    Lane("hf", 4, folders=("tests/hf",)),
    Lane("demo", 3, ((PYTHON, "examples/frozen_lake/demo.py", *DEMO_SMOKE),)),
    Lane("vllm", 8, VLLM_INSTALL, folders=("tests/vllm",), lock=VLLM_LOCK),
    Lane("vllm-full", 20, VLLM_INSTALL, folders=("tests/vllm",), select="", lock=VLLM_LOCK),
    Lane("slurm", 6, SLURM_INSTALL, folders=("tests/slurm",)),
    Lane("slurm-all", 30, SLURM_INSTALL, folders=("tests/slurm",), select=""),
    Lane("soak", 40, (*SLURM_INSTALL, (PYTHON, "tests/slurm/soak.py", "--kills", "20"))),
    Lane("gpu", 5, folders=("tests/gpu",)),
    Lane("matrix", 25, folders=("tests/dist",), select=""),
    Lane("hf-matrix", 8, folders=("tests/hf",), select=""),
    Lane("full", 60, folders=("tests",), select=""),
)
DEFAULT = ("setup", "lint", "unit", "dist", "hf", "demo", "vllm", "slurm")


@dataclass(frozen=True)
class Outcome:
    """How a lane ended."""

    lane: Lane
    result: str
    seconds: float


def run_lane(lane: Lane, python: str, root: Path = ROOT) -> Outcome:
    """Runs one lane in `root` with the interpreter `python`, its output going straight to ours."""
    print(f"\n=== {lane.name}", flush=True)
    start = time.monotonic()
    result = NO_TESTS if lane.folders else PASSED
    python = interpreter_of(lane.lock, root) if lane.lock else python
    for command in _commands(lane, python, root):
        left = 120 * lane.minutes - (time.monotonic() - start)
        result = _run(command, left, root)
        if result != PASSED:
            break
    return Outcome(lane, result, time.monotonic() - start)


def interpreter_of(lock: str, root: Path = ROOT) -> str:
    """Interpreter of the environment that `tools/environment.py` makes of a lock file; it need not be there yet."""
    # MEGATRON_RL_VENV names the folder of the main environment only.
    variables = {name: value for name, value in os.environ.items() if name != "MEGATRON_RL_VENV"}
    command = [sys.executable, "tools/environment.py", "path", lock]
    found = subprocess.run(command, cwd=root, env=variables, check=True, capture_output=True, text=True)
    return str(Path(found.stdout.strip()) / "bin" / "python")


def _commands(lane: Lane, python: str, root: Path) -> list[list[str]]:
    commands = [[python if word == PYTHON else word for word in command] for command in lane.commands]
    folders = [folder for folder in lane.folders if any((root / folder).rglob("test_*.py"))]
    for folder in set(lane.folders) - set(folders):
        print(f"{folder}: no tests", flush=True)
    if folders:
        commands.append([python, "-m", "pytest", "-q", "--durations=5", "-m", lane.select, *folders])
    return commands


def _run(command: list[str], seconds: float, root: Path) -> str:
    # Without MAKEFLAGS: a make below us must not look for the job server of a make above us.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    # Its own session, so that the limit reaches everything the command started.
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        status = process.wait(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        return "stopped at twice its share"
    finally:
        _end_group(process)
    if status == PYTEST_FOUND_NOTHING and "pytest" in command:
        return NO_TESTS
    return PASSED if status == 0 else f"failed (exit {status})"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of a command's process group: a request first, then by force."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        pass


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a lane: name, seconds, share in seconds, result."""
    lines = [f"{'lane':<10} {'seconds':>8} {'share':>6}  result"]
    for outcome in outcomes:
        share = 60 * outcome.lane.minutes
        lines.append(f"{outcome.lane.name:<10} {outcome.seconds:>8.1f} {share:>6.0f}  {outcome.result}")
    return "\n".join(lines)


def run_lanes(lanes: Sequence[Lane], python: str, root: Path = ROOT) -> int:
    """Runs the lanes in order, prints the table, and returns 0 if all passed, else 1."""
    outcomes: list[Outcome] = []
    for lane in lanes:
        outcomes.append(run_lane(lane, python, root))
        if lane.name == "setup" and outcomes[-1].result != PASSED:
            outcomes += [Outcome(later, "not run", 0.0) for later in lanes[lanes.index(lane) + 1 :]]
            break
    print(f"\n{table(outcomes)}", flush=True)
    return int(any(outcome.result != PASSED for outcome in outcomes))


def main() -> None:
    """Command line: `lanes.py [--python PATH] [LANE …]`."""
    known = {lane.name: lane for lane in LANES}
    parser = argparse.ArgumentParser(description="Runs the checks of this repository.")
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=", ".join(known))
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment under test")
    chosen = parser.parse_args()
    unknown = set(chosen.lanes) - set(known)
    if unknown:
        parser.error(f"unknown lane {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    # The default action would skip `finally` and leave the running lane's processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run_lanes([known[name] for name in chosen.lanes or DEFAULT], chosen.python))


if __name__ == "__main__":
    main()
