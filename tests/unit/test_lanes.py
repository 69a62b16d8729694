"""The lane runner: one failure stops nothing else, limits reach every process, empty lanes are told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import yaml

from tools.lanes import DEFAULT, LANES, LINT, NO_TESTS, PASSED, PYTHON, ROOT, Lane, interpreter_of, run_lane, run_lanes

OK = Lane("ok", 1, ((PYTHON, "-c", "print('ran')"),))
BAD = Lane("bad", 1, ((PYTHON, "-c", "raise SystemExit(3)"), (PYTHON, "-c", "print('not reached')")))


def test_failure_is_counted_and_the_others_still_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_lanes([BAD, OK], sys.executable) == 1
    output = capfd.readouterr().out
    assert "failed (exit 3)" in output and "ran" in output and "not reached" not in output
    assert run_lanes([OK], sys.executable) == 0


def test_nothing_runs_without_setup(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_lanes([Lane("setup", 1, BAD.commands), OK], sys.executable) == 1
    output = capfd.readouterr().out
    assert "not run" in output and "ran\n" not in output


def test_limit_ends_the_whole_process_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = "import subprocess; subprocess.run(['sh', '-c', 'echo $$ > pid; exec sleep 600'])"
    start = time.monotonic()
    outcome = run_lane(Lane("slow", 2 / 120, ((PYTHON, "-c", script),)), sys.executable, tmp_path)
    assert outcome.result == "stopped at twice its share"
    assert time.monotonic() - start < 30
    # Killed is not gone: a process handed to init disappears a moment later.
    started = f"/proc/{pid_file.read_text().strip()}/exe"
    while os.path.exists(started) and time.monotonic() - start < 30:
        time.sleep(0.05)
    assert not os.path.exists(started)


def test_missing_and_empty_folders_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_lane(Lane("none", 1, folders=("tests/none",)), sys.executable, tmp_path).result == NO_TESTS
    assert "tests/none: no tests" in capfd.readouterr().out
    (tmp_path / "test_nothing.py").write_text("")
    assert run_lane(Lane("empty", 1, folders=(".",)), sys.executable, tmp_path).result == NO_TESTS


def test_closing_line_of_pytest_is_visible(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    full: slow\n")
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    assert run_lane(Lane("one", 1, folders=(".",)), sys.executable, tmp_path).result == PASSED
    assert "1 passed in" in capfd.readouterr().out


def test_every_test_folder_is_in_a_lane() -> None:
    tests = Path(__file__).resolve().parents[1]
    holding = {f"tests/{path.relative_to(tests).parts[0]}" for path in tests.rglob("test_*.py")}
    assert holding <= {folder for lane in LANES for folder in lane.folders}


def test_hooks_run_what_the_lint_lane_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    found = [hook["entry"].split('/bin/python" ')[1].rstrip("'").split() for hook in hooks]
    assert found == [list(command[1:]) for command in LINT]


def test_default_lanes_exist() -> None:
    assert set(DEFAULT) <= {lane.name for lane in LANES}


def test_lane_with_a_lock_file_runs_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEGATRON_RL_VENV", "/elsewhere")
    lock = next(lane.lock for lane in LANES if lane.lock)
    python = Path(interpreter_of(lock))
    assert python.parent.parent.parent == tmp_path / "megatron_rl" and (ROOT / lock).is_file()
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert (
        run_lane(Lane("own", 1, ((PYTHON, "-c", "raise SystemExit(3)"),), lock=lock), "/no/such/python").result
        == PASSED
    )
