"""The comparison: what each recipe is given, what is kept, and how curves over seeds are summed up."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.yaml_file import dump_yaml
from megatron_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "examples" / "frozen_lake" / "ppo.yaml"
SIZES = ["iterations=4", "rollout.episodes=8"]


def _load_tool():
    spec = importlib.util.spec_from_file_location("compare_tool", ROOT / "tools" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(dump_yaml(tool.task_settings(TASK)))
    return path


def recipe(tmp_path: Path, name: str, **algorithm) -> Path:
    path = tmp_path / f"{name}.yaml"
    path.write_text(dump_yaml({"algorithm": algorithm}))
    return path


def curve(name: str, end: float, *, seed: int = 0, middle: float = 0.5):
    return tool.Curve(name, seed, [0, 8, 16], [0.1, middle, end], 2.0)


def test_only_recipes_that_compare_responses_get_several_of_a_prompt(tmp_path, base):
    group = ROOT / "examples" / "recipes" / "grpo.yaml"
    plain = recipe(tmp_path, "plain", anchor="recompute")
    assert tool.resolve(base, group, SIZES, 4).rollout.environment_options["maps_per_prompt"] == 4
    assert "maps_per_prompt" not in tool.resolve(base, plain, SIZES, 4).rollout.environment_options


def test_a_recipe_is_layered_over_the_task_and_shares_what_it_leaves_open(tmp_path, base):
    config = tool.resolve(base, recipe(tmp_path, "a", anchor="recompute", minibatches=4), SIZES, 1)
    task = load_config(TASK)
    assert config.algorithm.anchor.name == "recompute"
    assert config.algorithm.entropy_coef == task.algorithm.entropy_coef
    assert config.rollout.environment_options == task.rollout.environment_options
    assert config.parallel.expert == 1
    warm = task.algorithm.critic_warmup
    assert config.optimizer.decay_steps == (4 - warm) * 4 * task.algorithm.epochs


def test_runs_are_planned_seeds_outermost_and_keep_their_settings(tmp_path, base):
    recipes = [recipe(tmp_path, name, anchor="recompute") for name in ("a", "b")]
    plan = lambda *extra: tool.plan_runs(base, recipes, 2, tmp_path / "out", [*SIZES, *extra], 1)  # noqa: E731
    runs = plan()
    assert [run.directory.name for run in runs] == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    for run in runs:
        read = load_config(run.directory / "config.yaml")
        assert read == run.config
        assert (read.seed, read.model.path) == (run.seed, str(tmp_path / "out" / "warm-start"))
    assert [run.config for run in plan()] == [run.config for run in runs]
    with pytest.raises(ConfigError, match="a-seed0"):
        plan("optimizer.lr=0.5")


def test_a_curve_ends_with_the_budget_of_episodes(tmp_path, base):
    """A method that plays more episodes an iteration reaches the budget earlier."""
    (run,) = tool.plan_runs(base, [recipe(tmp_path, "a", anchor="recompute")], 1, tmp_path / "out", SIZES, 1)
    rows = [
        {"iteration": i, tool.EVALUATION: 0.2 * i, "seconds/rollout": 1.0 + i, "seconds/evaluate": 50.0, "x": None}
        for i in range(4)
    ]
    rows[1]["sampling/played"] = 16
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run.curve(0.05)
    assert found.episodes == [0, 8, 24, 32]
    assert found.success == [0.05, 0.0, 0.2, 0.4]
    assert found.seconds == 2.5


def test_a_curve_without_evaluations_in_the_budget_is_its_start():
    assert tool.Curve("a", 0, [0], [0.3], 1.0).area == 0.3


def test_recipes_are_ranked_by_the_median_over_seeds():
    ends = {"low": [0.9, 0.2, 0.3], "high": [0.4, 0.5, 0.6]}
    curves = [curve(name, end, seed=seed) for name, own in ends.items() for seed, end in enumerate(own)]
    assert list(tool.by_recipe(curves)) == ["high", "low"]
    tied = [curve("late", 0.5, middle=0.2), curve("early", 0.5, middle=0.4)]
    assert list(tool.by_recipe(tied)) == ["early", "late"]


def test_the_table_gives_least_median_and_greatest():
    curves = [curve("a", end, seed=seed) for seed, end in enumerate((0.2, 0.9, 0.3))]
    table = tool.markdown(curves, 0.1)
    assert "| a | 3 | 20 / 30 / 90 % | 35 / 40 / 70 % | 16 | 2.0 |" in table
    assert "Start: 10%" in table


def test_the_picture_takes_any_number_of_recipes(tmp_path):
    curves = [curve(f"r{i}", 0.1 * i, seed=seed) for i in range(5) for seed in range(2)]
    tool.draw(curves, tmp_path / "c.png", "title")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_runs_finish_are_kept_and_a_failed_one_is_named(tmp_path):
    good = recipe(tmp_path, "good", anchor="recompute", value={})
    command = [
        sys.executable, str(ROOT / "tools" / "compare.py"), str(TASK), str(good), "--seeds", "1", "--iterations", "1",
        "--episodes", "8", "--demonstrations", "32", "--warm-epochs", "1", "--output", str(tmp_path / "out"),
        "--set", "evaluation_episodes=8",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def compare(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=300)

    first = compare("--minutes", "0")
    assert "0 runs finished, 0 failed, 1 to do" in first.stdout, first.stderr
    second = compare()
    assert "1 runs finished, 0 failed, 0 to do" in second.stdout, second.stderr
    log = (tmp_path / "out" / "good-seed0" / "log.txt").read_text()
    assert compare().returncode == 0
    assert (tmp_path / "out" / "good-seed0" / "log.txt").read_text() == log
    (tmp_path / "out" / "good-seed0" / "finished").unlink()
    (tmp_path / "out" / "good-seed0" / "metrics.jsonl").unlink()
    for weights in (tmp_path / "out" / "warm-start").glob("*.safetensors"):
        weights.unlink()
    for folder in ("checkpoints", "weights"):
        (tmp_path / "out" / "good-seed0" / folder).rename(tmp_path / folder)
    broken = compare()
    assert broken.returncode == 1
    assert "good-seed0 failed" in broken.stdout
