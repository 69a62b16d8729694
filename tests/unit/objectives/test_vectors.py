"""Every case of the reference values, through the same adapter that operators run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

HERE = Path(__file__).parent
VECTORS = HERE / "vectors.json"
CASES = {case["name"]: case for case in json.loads(VECTORS.read_text())["cases"]}


def _load_tool():
    spec = importlib.util.spec_from_file_location("check_vectors", HERE.parents[2] / "tools" / "check_vectors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()


def _cli(*arguments: str):
    import typer

    app = typer.Typer()
    app.command()(tool.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype):
    failed = [result for result in tool.run_case(CASES[name], dtype) if not result.passed]
    assert not failed


def test_every_expected_output_is_computed():
    assert set(CASES) == set(tool.CASES)


def test_tool_reports_success_and_uncovered_cases(tmp_path: Path):
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"cases": [CASES["kl"], {"name": "unheard_of", "inputs": {}, "expect": {}}]}))
    result = _cli(str(file))
    assert result.exit_code == 0
    assert "cases not covered: unheard_of" in result.output


@pytest.mark.parametrize("change", [1e-4, float("nan")])
def test_tool_fails_on_a_wrong_value(tmp_path: Path, change: float):
    case = json.loads(json.dumps(CASES["kl"]))
    case["expect"]["k3"][1] += change
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"cases": [case]}))
    result = _cli(str(file))
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_tool_fails_on_an_output_nobody_computes_and_on_another_shape():
    case = json.loads(json.dumps(CASES["kl"]))
    case["expect"] = {"k4": [1.0], "k1": case["expect"]["k1"][:-1]}
    assert [result.error for result in tool.run_case(case, torch.float64)] == [torch.inf, torch.inf]
