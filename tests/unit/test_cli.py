"""Commands teach, and errors come without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


MODULES = ("megatron_rl", "megatron_rl.cli")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def cli(*arguments: str, module: str = "megatron_rl.cli") -> subprocess.CompletedProcess[str]:
    return python("-m", module, *arguments)


@pytest.mark.parametrize("module", MODULES)
def test_help_names_every_command(module: str) -> None:
    done = cli("--help", module=module)
    assert done.returncode == 0 and all(f" {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("module", MODULES)
def test_version_is_printed(module: str) -> None:
    done = cli("--version", module=module)
    assert (done.returncode, done.stdout.strip()) == (0, megatron_rl.__version__)


def test_commands_are_declared_without_heavy_libraries() -> None:
    script = "import sys, megatron_rl.cli.app; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(python("-c", script).stdout.split())
    assert "typer" in loaded and not loaded & {"torch", "numpy", "megatron", "transformers", "pyarrow", "omegaconf"}


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
