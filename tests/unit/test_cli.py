"""Commands teach, and errors come without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "megatron_rl.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_help_names_every_command() -> None:
    shown = cli("--help").stdout
    assert all(name in shown for name in ("train", "validate", "config"))


def test_config_prints_what_a_run_would_use() -> None:
    import yaml

    shown = yaml.safe_load(cli("config", "examples/frozen_lake/ppo.yaml", "optimizer.lr=0.5").stdout)
    assert shown["optimizer"]["lr"] == 0.5 and shown["algorithm"]["anchor"]["name"] == "ewma"


def test_an_unknown_key_is_an_error_of_one_line() -> None:
    done = cli("config", "examples/frozen_lake/ppo.yaml", "optimizer.rate=0.5")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "optimizer.rate" in done.stderr


def test_validate_exits_with_one_where_nothing_was_recorded(tmp_path: Path) -> None:
    done = cli("validate", str(tmp_path))
    assert done.returncode != 0 and "Traceback" not in done.stderr
