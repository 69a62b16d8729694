"""Metric sinks: JSON lines (one object an iteration) and TensorBoard.

Names are `group/name`. KL divergences and entropies are in nats, `rollout/tokens*` in tokens, throughput in tokens a
second and rank, `throughput/mfu` as a share of the measured matrix-multiply peak; the rest are shares or plain numbers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_rl.files import write_text


class MetricsLog:
    """Appends to `metrics.jsonl` and TensorBoard files of a run directory. One rank owns it.

    Args:
        directory: the run directory.
        resume_from: iterations at or after this one are dropped: a resumed run repeats them.
    """

    def __init__(self, directory: Path, resume_from: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / "metrics.jsonl"
        kept = [row for row in read_metrics(directory) if row["iteration"] < resume_from]
        write_text(self.file, "".join(json.dumps(row) + "\n" for row in kept))
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_from)

    def write(self, iteration: int, values: dict[str, float]) -> None:
        """Record one iteration. Values that are not finite become null in JSON and are left out of TensorBoard."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self.file.open("a") as stream:
            stream.write(json.dumps({"iteration": iteration, **finite}) + "\n")
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, iteration)
        self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self._board.close()


def read_metrics(directory: Path) -> list[dict]:
    """All recorded iterations of a run directory, in order; empty where none were. A torn last line is left out."""
    file = directory / "metrics.jsonl"
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
