"""From nothing to a trained policy: make a tiny model, teach it the action format, train it by PPO, export, compare.

    python examples/frozen_lake/demo.py            # two ranks, expert parallelism 2
    python examples/frozen_lake/demo.py --help

Stages: a random Qwen3-MoE checkpoint is written; supervised training on *random valid play* teaches how an action is
spelled and what the environment answers, not which action is good (warm start); PPO does the rest on maps drawn
afresh; success is measured by greedy play on 256
maps that training never sees. Controls: the warm start alone, PPO with learning rate 0, and the trained policy with its
observations blanked. The policy is then exported to HF format and measured again from the export.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main(
    output: Path = typer.Option(Path("runs/demo"), help="Where everything is written; replaced if it exists."),
    ranks: int = typer.Option(2, help="Processes; expert parallelism is 2."),
    iterations: int = typer.Option(None, help="PPO iterations; default: those of ppo.yaml."),
    episodes: int = typer.Option(None, help="Episodes per iteration; default: those of ppo.yaml."),
    evaluation: int = typer.Option(256, help="Held-out maps played greedily at each evaluation."),
    demonstrations: int = typer.Option(1024, help="Random plays of the warm start."),
    warm_epochs: int = typer.Option(3, help="Passes over them."),
    seed: int = typer.Option(0, help="Seed of model, maps and sampling."),
    override: list[str] = typer.Option([], "--set", help="Dotted settings over ppo.yaml."),
) -> None:
    """Run the demo and print first and last success, the controls and the minutes it took."""
    if "RANK" not in os.environ:
        raise typer.Exit(_launch(ranks))
    settings = [f"seed={seed}", f"evaluation_episodes={evaluation}", *override]
    settings += [f"iterations={iterations}"] if iterations is not None else []
    settings += [f"rollout.episodes={episodes}"] if episodes is not None else []
    _run(output, settings, demonstrations, warm_epochs)


def _launch(ranks: int) -> int:
    """Start the same command under torchrun."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.call([*command, *sys.argv], env=environment)


def _run(output: Path, settings: list[str], demonstrations: int, warm_epochs: int) -> None:
    import shutil

    import torch.distributed as dist

    from megatron_rl.config import load_config
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.launch.environment import ranks as join_ranks
    from megatron_rl.observe.progress import TerminalProgress
    from megatron_rl.training.trainer import Trainer
    from megatron_rl.training.warm_start import starting_from, warm_start

    began = time.perf_counter()
    config = load_config(Path(__file__).with_name("ppo.yaml"), settings)
    task = make_task(config.rollout.environment, config.rollout.environment_options)
    with join_ranks(config) as topology:
        first = topology.rank == 0
        if first:
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
        dist.barrier()
        start = warm_start(config, topology, task, output, demonstrations=demonstrations, epochs=warm_epochs)
        if first:
            steps = f"{len(start.losses)} steps on {demonstrations} random plays"
            print(
                f"warm start: {steps}, loss {start.losses[0]:.2f} → {start.losses[-1]:.2f} nats per token", flush=True
            )
        warm = start.path
        trained = starting_from(config, warm, output / "ppo")
        watch = TerminalProgress(output / "ppo", silent=not first)
        Trainer(trained, topology, task, watch).run()
        watch.finished()
        still = starting_from(config, warm, output / "control-lr0", iterations=2)
        still = still.model_copy(update={"optimizer": still.optimizer.model_copy(update={"lr": 0.0, "min_lr": 0.0})})
        Trainer(still, topology, task, TerminalProgress(output / "control-lr0", silent=True)).run()
        results = _measure(config, task, output, warm)
        if first:
            _report(output, watch.history, results, time.perf_counter() - began)


def _measure(config, task, output: Path, warm: Path) -> dict[str, float]:
    """Greedy success on held-out maps, each from an HF checkpoint."""
    from megatron_rl.backend import platform
    from megatron_rl.engines.local import LocalEngine
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.rollout_sources.sync import evaluate

    blanked = make_task(config.rollout.environment, {**config.rollout.environment_options, "blank": True})
    plays = {
        "warm start only": (warm, task),
        "learning rate 0": (output / "control-lr0" / "export", task),
        "trained, observations blanked": (output / "ppo" / "export", blanked),
        "trained, from the HF export": (output / "ppo" / "export", task),
    }
    engine_dtype = platform.dtype(config.rollout.engine_dtype or config.model.dtype)
    return {
        name: evaluate(config, LocalEngine(path, dtype=engine_dtype), played, config.evaluation_episodes)
        for name, (path, played) in plays.items()
    }


def _report(output: Path, history: list[dict], results: dict[str, float], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from megatron_rl.observe.progress import draw_curve, sparkline

    curve = [(row["iteration"] + 1, row["evaluation/success"]) for row in history if "evaluation/success" in row]
    controls = {name: value for name, value in results.items() if "export" not in name}
    draw_curve(history, output / "curve.png", controls=controls)
    table = Table("greedy success on held-out maps", "share")
    for name, value in results.items():
        table.add_row(name, f"{value:.1%}")
    console = Console()
    console.print(table)
    console.print(
        f"learning curve, greedy: {sparkline([value for _, value in curve])}  "
        + " ".join(f"{i}:{v:.0%}" for i, v in curve)
    )
    console.print(f"sampled success:        {sparkline([row.get('rollout/success', 0.0) for row in history])}")
    for name, where in {
        "HF export": "ppo/export", "critic": "ppo/export-critic", "checkpoints": "ppo/checkpoints", "rollouts":
        "ppo/rollouts", "metrics": "ppo/metrics.jsonl", "TensorBoard": "ppo/tensorboard", "curve": "curve.png",
    }.items():  # fmt: skip
        console.print(f"{name}: {output / where}")
    first, last = results["warm start only"], results["trained, from the HF export"]
    margin = last - max(controls.values())
    console.print(
        f"success {first:.1%} → {last:.1%}, at least {100 * margin:.0f} points above every control, "
        f"{seconds / 60:.1f} minutes"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
