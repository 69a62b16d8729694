"""How long the trainer waits for rollouts, and how fast it steps, by how far playing may run ahead of it.

    python tools/bench/async.py
    python tools/bench/async.py --help

A real trainer (this process) and a real rollout process with the embedded engine, over files, on a task whose
environment takes log-normal time a step (coefficient of variation 2). Staleness 0 is synchronous: the trainer waits
until a batch was played by its newest weights. The first iterations of each run are left out: the process starts then.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from math import log, sqrt
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.environments.frozen_lake import FrozenLakeTask

CV = 2.0
WARM_UP = 4
"""Iterations left out."""


class LatencyLake(FrozenLakeTask):
    """The frozen lake with log-normal latency of mean `latency` seconds and coefficient of variation CV a step."""

    def __init__(self, latency: float = 0.05, **options) -> None:
        super().__init__(**options)
        spread = sqrt(log(1 + CV**2))
        self._draw_seconds: Callable[[random.Random], float] = lambda rng: rng.lognormvariate(
            log(latency) - spread**2 / 2, spread
        )

    def make_env(self, spec):
        """A lake whose steps take time."""
        env, rng = super().make_env(spec), random.Random(spec.trajectory_id)
        step = env.step

        def late_step(action):
            time.sleep(self._draw_seconds(rng))
            return step(action)

        env.step = late_step
        return env


class _Quiet:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def started(self, iterations: int, done: int) -> None: ...

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        self.rows.append({**values, "when": time.perf_counter()})


def main(
    staleness: list[int] = typer.Option([0, 1, 2, 4], help="Bounds to compare; 0 is synchronous."),
    iterations: int = typer.Option(24, help="Iterations of each run, the first 4 not counted."),
    episodes: int = typer.Option(16, help="Episodes of an iteration."),
    latency: float = typer.Option(0.1, help="Mean seconds of an environment step."),
) -> None:
    """Print the trainer's idle share, its speed, the ages it trained on, and the bytes that a token takes."""
    from megatron_rl.config import parse_config
    from megatron_rl.launch.environment import ranks

    table = Table("bound", "trainer idle", "steps/s", "vs sync", "mean age", "max age", "given up", "B/token",
                  title=f"staleness, latency {latency:g} s a step, CV {CV:g}")  # fmt: skip
    base: float | None = None
    with ranks(parse_config({})) as topology, tempfile.TemporaryDirectory() as folder:
        for bound in staleness:
            plain = _settings(Path(folder), bound, iterations, episodes, latency)
            rows = _run(plain, topology)
            kept, seconds = rows[WARM_UP:], rows[-1]["when"] - rows[WARM_UP - 1]["when"]
            speed = len(kept) / seconds
            base = base or speed
            idle = sum(row["seconds/rollout"] for row in kept) / seconds
            mean_age = statistics.fmean(row["stream/staleness_mean"] for row in kept)
            greatest = max(row["stream/staleness_max"] for row in kept)
            print(f"staleness {bound}: trainer idle {idle:.0%}, {speed:.2f} steps/s", flush=True)
            table.add_row(
                str(bound), f"{idle:.0%}", f"{speed:.2f}", f"{speed / base:.2f}x", f"{mean_age:.2f}",
                f"{greatest:.0f}", f"{kept[-1]['stream/expired']:.0f}", f"{kept[-1]['stream/bytes_per_token']:.1f}",
            )  # fmt: skip
    Console().print(table)


def _settings(folder: Path, bound: int, iterations: int, episodes: int, latency: float) -> dict:
    from megatron_rl.engines.tiny import write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    model = folder / "model"
    if not model.exists():
        write_tiny_checkpoint(model, lake_vocabulary())
    return {
        "output": str(folder / f"staleness-{bound}"),
        "model": {"path": str(model), "dtype": "float32"},
        "iterations": iterations,
        "evaluate_every": 0,
        "evaluation_episodes": 1,
        "batching": {"token_budget": 4096},
        "algorithm": {"anchor": "ewma", "importance": {"name": "sequence", "cap": 2.0}},
        "rollout": {
            "mode": "async",
            "max_staleness": bound,
            "environment": "tools.bench.async:LatencyLake",
            "environment_options": {"latency": latency, "evaluation_maps": 4},
            "episodes": episodes,
            "concurrency": episodes * (bound + 1),
            "max_turns": 4,
            "max_action_tokens": 3,
            "shard_seconds": 0.1,
        },
        "first_step_check": {"enabled": False},
    }


def _run(plain: dict, topology) -> list[dict[str, float]]:
    from megatron_rl.config import parse_config
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.trainer import Trainer

    config, watch = parse_config(plain), _Quiet()
    task = make_task(config.rollout.environment, config.rollout.environment_options)
    Trainer(config, topology, task, watch).run()
    return watch.rows


if __name__ == "__main__":
    typer.run(main)
