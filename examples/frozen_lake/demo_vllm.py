"""The demo's task learned from vLLM: a rollout process plays while the trainer trains, up to two versions apart.

    make demo-vllm
    python examples/frozen_lake/demo_vllm.py --help          # in the environment of make setup-vllm

Same size of model (with attention heads of 32, the least that vLLM has a CPU kernel for), warm start, task and
objective as `demo.py`, on one trainer rank. Episodes are played by a vLLM in a process of its own, which takes up new
weights while episodes are in flight, records the version and log-prob of every token and the experts of every fed one,
and also plays the held-out maps greedily. Trainer and rollout process share nothing but the run directory.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ASYNCHRONOUS = (
    "parallel.expert=1",
    "rollout.engine=vllm",
    "rollout.engine_options={kv_cache_bytes: 67108864, max_num_seqs: 64}",
    "rollout.mode=async",
    "rollout.max_staleness=2",
    "rollout.concurrency=64",
)


def main(
    output: Path = typer.Option(Path("runs/demo-vllm"), help="Where everything is written; replaced if it exists."),
    iterations: int = typer.Option(40, help="PPO iterations."),
    episodes: int = typer.Option(128, help="Episodes per iteration."),
    evaluation: int = typer.Option(256, help="Held-out maps played greedily at each evaluation."),
    demonstrations: int = typer.Option(1024, help="Random plays of the warm start."),
    warm_epochs: int = typer.Option(3, help="Passes over them."),
    seed: int = typer.Option(0, help="Seed of model, maps and sampling."),
    override: list[str] = typer.Option([], "--set", help="Dotted settings over ppo.yaml."),
) -> None:
    """Run the demo; print the success curve, the ages of the tokens trained on, and the minutes it took."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_rl.config import load_config
    from megatron_rl.engines.tiny import TinyShape
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.launch.environment import ranks
    from megatron_rl.observe.progress import TerminalProgress
    from megatron_rl.training.trainer import Trainer
    from megatron_rl.training.warm_start import starting_from, warm_start

    began = time.perf_counter()
    settings = [f"seed={seed}", f"iterations={iterations}", f"rollout.episodes={episodes}"]
    settings += [f"evaluation_episodes={evaluation}", *ASYNCHRONOUS, *override]
    config = load_config(Path(__file__).with_name("ppo.yaml"), settings)
    task = make_task(config.rollout.environment, config.rollout.environment_options)
    shutil.rmtree(output, ignore_errors=True)
    with ranks(config) as topology:
        shape = TinyShape(num_heads=2, num_kv_heads=1, head_dim=32)
        start = warm_start(
            config, topology, task, output, demonstrations=demonstrations, epochs=warm_epochs, shape=shape
        )
        print(f"warm start: loss {start.losses[0]:.2f} → {start.losses[-1]:.2f} nats per token", flush=True)
        watch = TerminalProgress(output / "ppo")
        Trainer(starting_from(config, start.path, output / "ppo"), topology, task, watch).run()
        watch.finished()
        before, after = (_success(config, task, path) for path in (start.path, output / "ppo" / "export"))
    _report(watch.history, before, after, time.perf_counter() - began)


def _success(config, task, weights: Path) -> float:
    """Greedy success on held-out maps with another engine than the one that trained."""
    from megatron_rl.backend import platform
    from megatron_rl.engines.local import LocalEngine
    from megatron_rl.training.rollout_sources.sync import evaluate

    engine = LocalEngine(weights, dtype=platform.dtype(config.model.dtype))
    return evaluate(config, engine, task, config.evaluation_episodes)


def _report(history: list[dict], before: float, after: float, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from megatron_rl.observe.progress import sparkline

    console = Console()
    curve = [
        (int(row["evaluation/version"]), row["evaluation/success"]) for row in history if "evaluation/success" in row
    ]
    points = " ".join(f"{version}:{success:.0%}" for version, success in curve)
    console.print(f"greedy success by weight version: {sparkline([value for _, value in curve])}  {points}")
    shares: dict[int, float] = defaultdict(float)
    for row in history:
        for name, share in row.items():
            if name.startswith("stream/staleness_share/"):
                shares[int(name.rsplit("/", 1)[1])] += share / len(history)
    table = Table("versions behind", "share of trained tokens", "")
    for age, share in sorted(shares.items()):
        table.add_row(str(age), f"{share:.1%}", "█" * round(40 * share))
    console.print(table)
    spanning = sum(row.get("stream/spanning", 0.0) for row in history) / len(history)
    waiting = sum(row["seconds/rollout"] for row in history)
    console.print(f"episodes that several versions sampled: {spanning:.0%}; trainer waited {waiting:.0f} s in all")
    console.print(f"success {before:.1%} → {after:.1%} (embedded engine), {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
