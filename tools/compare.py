"""Compare objectives: one task, one warm-started model, the same number of episodes for every recipe and seed.

    python tools/compare.py examples/frozen_lake/ppo.yaml examples/recipes/ppo.yaml examples/recipes/grpo.yaml

The first file is the task; recipes are layered over it, so that whatever a recipe leaves open (discount, entropy bonus,
learning rates, steps an iteration) is the same for all. Each run is one process of one rank; a few run at a time.
Finished runs are kept: the same command continues where it was stopped, and `--minutes` stops it early. A recipe that
compares responses of one prompt gets `--group` of them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
# Runs from a checkout without installing it.
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from megatron_rl.config import RunConfig

GROUP_OPTIONS = {"prompts": "responses_per_prompt"}
"""Task option that sets the size of a group; `maps_per_prompt` for all others."""
EVALUATION = "evaluation/success"


@dataclass(frozen=True)
class Curve:
    """Greedy success of one run against the episodes it has played."""

    recipe: str
    seed: int
    episodes: list[int]
    success: list[float]
    seconds: float
    """Median seconds of an iteration, evaluations not counted."""

    @property
    def area(self) -> float:
        """Mean success over the evaluations after the start (the start if there is none): how early it was learnt."""
        return statistics.fmean(self.success[1:] or self.success)


@dataclass(frozen=True, eq=False)
class Run:
    """One recipe with one seed."""

    recipe: str
    seed: int
    directory: Path
    config: RunConfig

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics so far, one dict an iteration."""
        from megatron_rl.observe.sinks import read_metrics

        return read_metrics(self.directory)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        return (self.directory / "finished").exists()

    def start(self) -> subprocess.Popen:
        """Train in a process of its own; what it says goes to `log.txt`."""
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "megatron_rl.cli", "train", str(self.directory / "config.yaml")]
        with (self.directory / "log.txt").open("a") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def curve(self, start: float) -> Curve:
        """Its learning curve; `start` is the success of the warm start.

        Dynamic sampling plays more than an iteration's episodes: what comes after all others' last episode is left out.
        """
        budget = self.config.iterations * self.config.rollout.episodes
        episodes, success, played = [0], [start], 0
        for row in self.rows:
            played += int(row.get("sampling/played", self.config.rollout.episodes))
            if row.get(EVALUATION) is not None and played <= budget:
                episodes.append(played)
                success.append(row[EVALUATION])
        seconds = [
            sum(v for k, v in row.items() if k.startswith("seconds/") and k != "seconds/evaluate" and v)
            for row in self.rows
        ]
        return Curve(self.recipe, self.seed, episodes, success, statistics.median(seconds))


def task_settings(task: Path) -> dict[str, Any]:
    """The task's file without what belongs to a layout or to this comparison."""
    from megatron_rl.config.yaml_file import read_yaml_file

    whole = read_yaml_file(task)
    return {name: value for name, value in whole.items() if name not in ("parallel", "output")}


def grouped(recipe: Path) -> bool:
    """Whether the recipe compares responses of one prompt."""
    from megatron_rl.config import load_config

    return load_config(recipe).algorithm.needs_groups


def resolve(base: Path, recipe: Path | None, overrides: Sequence[str], group: int) -> RunConfig:
    """Task, recipe and overrides in one configuration; the learning rate falls over the whole run."""
    from megatron_rl.config import load_config

    settings = list(overrides)
    if recipe is not None and grouped(recipe):
        environment = load_config(base).rollout.environment
        option = GROUP_OPTIONS.get(environment, "maps_per_prompt")
        settings.insert(0, f"rollout.environment_options.{option}={group}")
    config = load_config([base] if recipe is None else [base, recipe], settings)
    algorithm = config.algorithm
    steps = max(config.iterations - algorithm.critic_warmup, 1) * algorithm.minibatches * algorithm.epochs
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"decay_steps": steps})})


def plan_runs(
    base: Path, recipes: Sequence[Path], seeds: int, output: Path, overrides: Sequence[str], group: int
) -> list[Run]:
    """Every seed of every recipe, seeds outermost: what is there after a while compares all recipes.

    Raises:
        ConfigError: a run directory holds another configuration.
    """
    from megatron_rl.config.yaml_file import dump_yaml
    from megatron_rl.errors import ConfigError

    runs = []
    for seed in range(seeds):
        for recipe in recipes:
            directory = output / f"{recipe.stem}-seed{seed}"
            places = [f"seed={seed}", f"output={directory}", f"model.path={output / 'warm-start'}"]
            config = resolve(base, recipe, [*overrides, *places], group)
            text, file = dump_yaml(config.model_dump()), directory / "config.yaml"
            if file.exists() and file.read_text() != text:
                raise ConfigError("this run was begun with other settings", file=file, setting="--output")
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            runs.append(Run(recipe.stem, seed, directory, config))
    return runs


def start_success(
    base: Path, output: Path, overrides: Sequence[str], *, demonstrations: int, epochs: int, layers: int
) -> float:
    """Make the model that every run begins with, unless it is there; returns its greedy success."""
    result = output / "warm-start.json"
    if not result.exists():
        from megatron_rl.engines.local import LocalEngine
        from megatron_rl.engines.tiny import TinyShape
        from megatron_rl.environments.tasks import make_task
        from megatron_rl.launch.environment import ranks
        from megatron_rl.training.rollout_sources.sync import evaluate
        from megatron_rl.training.warm_start import warm_start

        config = resolve(base, None, overrides, 1)
        task = make_task(config.rollout.environment, config.rollout.environment_options)
        with ranks(config) as topology:
            start = warm_start(
                config, topology, task, output, demonstrations=demonstrations, epochs=epochs,
                shape=TinyShape(num_layers=layers),
            )  # fmt: skip
            success = evaluate(config, LocalEngine(start.path), task, config.evaluation_episodes)
        result.write_text(json.dumps({"success": success, "losses": start.losses}))
    return json.loads(result.read_text())["success"]


def run_all(runs: Sequence[Run], workers: int, deadline: float) -> list[Run]:
    """Run what is not finished, `workers` at a time; returns those that failed.

    After `deadline` (of `time.monotonic`) those at work are stopped; they resume from their last checkpoint.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    waiting = [run for run in runs if not run.finished]
    active: dict[Run, subprocess.Popen] = {}
    failed: list[Run] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("ETA"))
    with Progress(*columns, TimeRemainingColumn(), speed_estimate_period=600) as progress:
        bar = progress.add_task("", total=sum(run.config.iterations for run in runs))
        try:
            while (waiting or active) and time.monotonic() < deadline:
                while waiting and len(active) < workers:
                    run = waiting.pop(0)
                    active[run] = run.start()
                for run, process in [(r, p) for r, p in active.items() if p.poll() is not None]:
                    del active[run]
                    failed += _ended(run, process.returncode, progress.console)
                names = ", ".join(run.directory.name for run in active)
                finished = sum(run.finished for run in runs)
                done = sum(len(run.rows) for run in runs)
                progress.update(bar, completed=done, description=f"{finished}/{len(runs)} runs: {names}")
                time.sleep(0.5)
        finally:
            _stop(list(active.values()))
    return failed


def _ended(run: Run, status: int, console) -> list[Run]:
    """Note how a run ended; returns it if it failed."""
    if status == 0:
        (run.directory / "finished").touch()
        last = [row[EVALUATION] for row in run.rows if row.get(EVALUATION) is not None][-1]
        console.print(f"{run.directory.name}: greedy success {last:.1%}")
        return []
    tail = (run.directory / "log.txt").read_text().splitlines()[-3:]
    console.print(f"{run.directory.name} failed (exit {status}), see {run.directory / 'log.txt'}: {' | '.join(tail)}")
    return [run]


def _stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(least, median, greatest)."""
    return min(values), statistics.median(values), max(values)


def by_recipe(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Curves of each recipe, the recipe with the greatest median at the end first; ties by how early it learnt."""
    names = dict.fromkeys(curve.recipe for curve in curves)
    found = {name: [curve for curve in curves if curve.recipe == name] for name in names}

    def key(name: str) -> tuple[float, float]:
        ends = [curve.success[-1] for curve in found[name]]
        return -statistics.median(ends), -statistics.median([curve.area for curve in found[name]])

    return {name: found[name] for name in sorted(found, key=key)}


def markdown(curves: Sequence[Curve], start: float) -> str:
    """One row a recipe: least, median, greatest over seeds."""
    lines = [
        "| recipe | seeds | success at the end | mean over the run | episodes | seconds an iteration |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in by_recipe(curves).items():
        end, area = spread([c.success[-1] for c in own]), spread([c.area for c in own])
        episodes = statistics.median([c.episodes[-1] for c in own])
        seconds = statistics.median([c.seconds for c in own])
        cells = [" / ".join(f"{100 * value:.0f}" for value in triple) + " %" for triple in (end, area)]
        lines.append(f"| {name} | {len(own)} | {cells[0]} | {cells[1]} | {episodes:.0f} | {seconds:.1f} |")
    return "\n".join(
        [*lines, "", f"Success is greedy, on held-out episodes: least / median / greatest. Start: {start:.0%}."]
    )


def draw(curves: Sequence[Curve], target: Path, title: str) -> None:
    """A panel for each recipe: median and range over seeds, the medians of the others in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recipes = by_recipe(curves)
    columns = min(4, len(recipes))
    rows = math.ceil(len(recipes) / columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.4 * rows + 0.4), sharex=True, sharey=True, squeeze=False
    )
    medians = {name: _across(own, statistics.median) for name, own in recipes.items()}
    for panel, (name, own) in zip(panels.flat, recipes.items(), strict=False):
        for other in recipes:
            panel.plot(*medians[other], color="0.85", linewidth=1, zorder=1)
        (x, low), (_, high) = _across(own, min), _across(own, max)
        panel.fill_between(x, low, high, alpha=0.25, color="tab:blue", linewidth=0)
        panel.plot(*medians[name], color="tab:blue", zorder=2)
        panel.set_title(name, fontsize=10)
        panel.set_ylim(0, 1.02)
    for panel in list(panels.flat)[len(recipes) :]:
        panel.set_visible(False)
    figure.supxlabel("episodes played", fontsize=9)
    figure.supylabel("greedy success, held out", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _across(curves: Sequence[Curve], reduce) -> tuple[list[int], list[float]]:
    """A statistic over seeds at each evaluation that all of them have."""
    points = min(len(curve.success) for curve in curves)
    x = [int(statistics.median([curve.episodes[i] for curve in curves])) for i in range(points)]
    return x, [reduce([curve.success[i] for curve in curves]) for i in range(points)]


def main(
    task: Annotated[Path, typer.Argument(help="YAML of the task, for instance examples/frozen_lake/ppo.yaml.")],
    recipes: Annotated[list[Path], typer.Argument(help="YAML of each recipe, layered over the task.")],
    seeds: Annotated[int, typer.Option(help="Seeds of each recipe, 0 to this less one.")] = 3,
    iterations: Annotated[int, typer.Option(help="Iterations of each run.")] = 20,
    episodes: Annotated[int, typer.Option(help="Episodes of an iteration.")] = 64,
    evaluations: Annotated[int, typer.Option(help="Evaluations of each run, evenly spread.")] = 5,
    group: Annotated[int, typer.Option(help="Responses of a prompt, for recipes that compare them.")] = 8,
    workers: Annotated[int, typer.Option(help="Runs at a time, one CPU core each.")] = 2,
    minutes: Annotated[float, typer.Option(help="Stop after this long; the same command goes on.")] = 1e6,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    demonstrations: Annotated[int, typer.Option(help="Random plays of the warm start.")] = 1024,
    warm_epochs: Annotated[int, typer.Option(help="Passes over them.")] = 3,
    output: Annotated[Path, typer.Option(help="Directory of all runs.")] = Path("runs/compare"),
    override: Annotated[list[str] | None, typer.Option("--set", help="Dotted settings over every recipe.")] = None,
) -> None:
    """Run recipes on a task and write comparison.md, comparison.png and comparison.json to the output directory."""
    from megatron_rl.config.yaml_file import dump_yaml

    deadline = time.monotonic() + 60 * minutes
    # The default action would skip `finally` and leave the runs behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output.mkdir(parents=True, exist_ok=True)
    base = output / "task.yaml"
    base.write_text(dump_yaml(task_settings(task)))
    overrides = [
        f"iterations={iterations}", f"rollout.episodes={episodes}",
        f"evaluate_every={max(iterations // evaluations, 1)}", *(override or []),
    ]  # fmt: skip
    runs = plan_runs(base, recipes, seeds, output, overrides, group)
    start = start_success(base, output, overrides, demonstrations=demonstrations, epochs=warm_epochs, layers=layers)
    failed = run_all(runs, workers, deadline)
    curves = [run.curve(start) for run in runs if run.finished]
    if curves:
        table = markdown(curves, start)
        (output / "comparison.md").write_text(table + "\n")
        (output / "comparison.json").write_text(json.dumps([vars(curve) for curve in curves], indent=1))
        draw(curves, output / "comparison.png", f"{task.parent.name}: median and range of {seeds} seeds")
        print(table)
    left = len(runs) - len(curves) - len(failed)
    print(f"{len(curves)} runs finished, {len(failed)} failed, {left} to do; see {output}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
