"""`megatron-rl convert` as a user starts it."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_rl.cli.app import app
from megatron_rl.errors import CheckpointError, ConfigError
from tests.unit.hf.checkpoints import edit_tensors, tensors_of

ROOT = Path(__file__).resolve().parents[3]
ALONE: list[str] = []
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(ALONE, marks=pytest.mark.full)], ids=["torchrun", "alone"])
def test_it_converts_and_verifies_under_a_launcher(checkpoint, tmp_path, launcher) -> None:
    source, target = checkpoint("dense_layers"), tmp_path / "out"
    options = ["--shard-gb", "0.00006", "--verify", "--patience", "60"]
    command = [sys.executable, *launcher, str(ROOT / "tools" / "convert_hf.py"), str(source), str(target)]
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    difference = float(re.search(r"largest difference to transformers (\S+),", done.stdout)[1])
    assert difference <= 1e-5 and done.stdout.count("bit for bit") == 1
    stored, written = tensors_of(source), tensors_of(target)
    assert written.keys() == stored.keys() and all(torch.equal(stored[n], written[n]) for n in stored)


def run(*words: object):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def test_check_prints_every_fault_and_fails(checkpoint, tmp_path) -> None:
    source = checkpoint("plain")
    good = run(source, "--check")
    assert good.exit_code == 0 and "finite and of its shape" in good.stdout
    bad = shutil.copytree(source, tmp_path / "bad")
    edit_tensors(bad, lambda tensors: tensors["model.layers.3.mlp.gate.weight"].fill_(math.nan))
    found = run(bad, "--check")
    assert found.exit_code == 1 and "non_finite: model.layers.3.mlp.gate.weight" in found.stdout
    edit_tensors(bad, lambda tensors: tensors.pop("lm_head.weight"))
    edit_tensors(bad, lambda tensors: tensors.pop("model.norm.weight"))
    found = run(bad, "--check")
    assert found.exit_code == 1 and all(
        f"missing: {name}" in found.stdout for name in ("lm_head.weight", "model.norm.weight")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to write to"),
        (["out", "--check"], "a check writes nothing"),
        (["out", "--shard-gb", "0"], "no room in a file"),
        (["out", "--dtype", "int8"], "unknown dtype"),
        (["out", "--role", "critic"], "one set of weights"),
        (["out", "--agent", "critic"], "--role"),
    ],
)
def test_options_that_contradict_are_refused(checkpoint, tmp_path, words, message) -> None:
    words = [tmp_path / word if word == "out" else word for word in words]
    found = run(checkpoint("plain"), *words)
    assert isinstance(found.exception, (CheckpointError, ConfigError)) and message in str(found.exception)
    assert not (tmp_path / "out").exists()


def test_neither_checkpoint_nor_run_is_refused(tmp_path) -> None:
    found = run(tmp_path, tmp_path / "out")
    assert "no checkpoint here" in str(found.exception) and found.exception.setting == "SOURCE"
    same = run(tmp_path, tmp_path)
    assert "source and target are one" in str(same.exception)


def test_the_logits_of_a_large_model_are_not_computed(checkpoint, tmp_path) -> None:
    found = run(checkpoint("plain"), tmp_path / "out", "--verify", "--logits-gb", "0.0001")
    assert found.exit_code == 0 and "not compared" in found.stdout.replace("\n", " ")
