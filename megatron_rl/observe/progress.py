"""Progress of a run in a terminal, a final table, and the learning curve as a picture and as text."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first: there may be no screen)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_rl.observe.sinks import MetricsLog

SHOWN = {
    "evaluation/success": "greedy success",
    "rollout/success": "sampled success",
    "rollout/reward_mean": "reward",
    "critic/explained_variance": "explained variance",
    "actor/entropy": "entropy",
    "actor/grad_norm": "gradient norm",
    "replay/agreement": "replay agreement",
    "mismatch/anchor_k3": "k3(anchor, engine)",
    "is/sequence_ess": "sequence ESS",
    "throughput/train_tokens_per_second_per_rank": "train tokens/s/rank",
    "throughput/mfu": "MFU",
}
"""Metric → its label in the final table and the curves."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class TerminalProgress:
    """Reports a run from rank 0: a progress bar, `metrics.jsonl`, TensorBoard. Other ranks pass `silent=True`.

    Args:
        output: the run directory.
        silent: do nothing.
    """

    def __init__(self, output: Path, *, silent: bool = False, console: Console | None = None) -> None:
        self.output, self.silent, self.console = output, silent, console or Console()
        self.history: list[dict[str, float]] = []
        self._log: MetricsLog | None = None

    def started(self, iterations: int, done: int) -> None:
        """Called once, before the first iteration."""
        if self.silent:
            return
        self._log = MetricsLog(self.output, resume_from=done)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self.console)
        self._progress.start()
        self._bar = self._progress.add_task("iterations", total=iterations, completed=done)

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        """Called after each iteration."""
        self.history.append({"iteration": iteration, **values})
        if self._log is None:
            return
        self._log.write(iteration, values)
        self._progress.update(self._bar, completed=iteration + 1)
        if "evaluation/success" in values:
            line = f"iteration {iteration + 1}: greedy success {values['evaluation/success']:.1%}"
            self.console.print(f"{line}, sampled {values.get('rollout/success', float('nan')):.1%}")

    def finished(self) -> None:
        """Called after the last iteration: close files, print the table."""
        if self._log is None:
            return
        self._progress.stop()
        self._log.close()
        if self.history:
            self.console.print(summary_table(self.history))


def summary_table(history: list[dict[str, float]]) -> Table:
    """First and last value of the shown metrics."""
    table = Table("metric", "first", "last", title="run")
    for name, label in SHOWN.items():
        values = [row[name] for row in history if name in row]
        if values:
            table.add_row(label, f"{values[0]:.4g}", f"{values[-1]:.4g}")
    return table


def sparkline(values: list[float]) -> str:
    """A curve between 0 and 1 as text."""
    return "".join(_BLOCKS[min(int(max(v, 0.0) * len(_BLOCKS)), len(_BLOCKS) - 1)] for v in values)


def draw_curve(history: list[dict[str, float]], target: Path, *, controls: dict[str, float] | None = None) -> None:
    """Success against iterations as a PNG; controls are dotted lines."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in ("evaluation/success", "rollout/success"):
        points = [(row["iteration"] + 1, row[name]) for row in history if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=SHOWN[name], marker="o" if len(points) < 40 else None)
    for place, (label, value) in enumerate((controls or {}).items()):
        axes.axhline(value, linestyle=":", color="grey")
        # Controls often lie on one another: each label has its own third of the width.
        axes.annotate(label, (0.02 + 0.33 * place, value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set(xlabel="iteration", ylabel="share of episodes solved", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
