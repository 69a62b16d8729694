"""Training from recorded files alone: no engine, no environment, no published weights.

A directory with a ledger (`consumed.jsonl`: the directory of a run) is replayed: every iteration trains on exactly the
trajectories it trained on then, in the same order. Other directories of shards are read in the order of shard names,
`rollout.episodes` trajectories an iteration; the last one may have fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import read_batch, read_manifest, select_rows, shard_paths
from megatron_rl.rollouts.validate import ANY_VERSION
from megatron_rl.run_dir import ledger
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.rollout_sources.base import IterationRollouts, SourceContext
from megatron_rl.training.rollout_sources.validation import validated


class RecordedRolloutSource:
    """Reads recorded rollouts, in order, until there are no more.

    Args:
        context: configuration (`rollout.recorded`) and what belongs to it.

    Raises:
        RolloutError: the directory holds no recorded rollouts.
    """

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._directory = Path(context.config.rollout.recorded)
        self._entries = {entry.iteration: entry for entry in ledger.read_entries(self._directory / ledger.NAME)}
        self._shards = [] if self._entries else _shards(self._directory)
        self._given = 0
        """Trajectories given out so far, where there is no ledger."""

    def next_rollouts(self, iteration: int, version: int) -> IterationRollouts | None:
        """The iteration's entry of the ledger, or the next `rollout.episodes` trajectories; None past the last."""
        if self._entries:
            entry = self._entries.get(iteration)
            return None if entry is None else self._validated(ledger.reread(entry, self._directory), version)
        count = self._context.config.rollout.episodes
        batch = _slice(self._shards, self._given, self._given + count)
        if batch is None:
            return None
        self._given += len(batch)
        return self._validated(batch, ANY_VERSION)

    def replay(self, batch: RolloutBatch) -> IterationRollouts:
        """The rollouts as they are; the next ones are those after them."""
        self._given += self._context.config.rollout.episodes
        return IterationRollouts(batch)

    def publish(self, models: ActorCritic, batch: RolloutBatch | None = None) -> None:
        """Nothing: nobody plays."""

    def evaluate(self, episodes: int, *, final: bool) -> Mapping[str, float]:
        """Nothing: nobody plays."""
        return {}

    def state(self) -> dict[str, Any]:
        """How many trajectories were given out."""
        return {"given": self._given}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the trajectories that were given out."""
        self._given = state.get("given", 0)

    def close(self, *, complete: bool) -> None:
        """Nothing to close."""

    def _validated(self, batch: RolloutBatch, version: int) -> IterationRollouts:
        side = self._context.output / "rollouts"
        kept, _ = validated(self._context.config, batch, self._context.fingerprint, version, side)
        return IterationRollouts(kept)


def _shards(directory: Path) -> list[tuple[Path, int]]:
    """(file, rows) of every committed shard of a directory and those below it, by name."""
    folders = sorted({directory, *(path.parent for path in shard_paths(directory, folders="**"))})
    folders = [folder for folder in folders if folder.name != "quarantine"]
    found = [(folder / shard.file, shard.rows) for folder in folders for shard in read_manifest(folder)]
    if not found:
        raise RolloutError(
            "no recorded rollouts", file=directory, found="no committed shard",
            expected="the directory of a run, or shards", setting="rollout.recorded (--rollouts)",
        )  # fmt: skip
    return found


def _slice(shards: list[tuple[Path, int]], begin: int, end: int) -> RolloutBatch | None:
    """Trajectories [begin, end) of all shards in a row; None past the last."""
    starts = np.cumsum([0, *(rows for _, rows in shards)])
    spans = zip((file for file, _ in shards), starts[:-1], starts[1:], strict=True)
    inside = [(file, first) for file, first, past in spans if first < end and past > begin]
    if not inside:
        return None
    batch = read_batch([file for file, _ in inside], verify_checksums=dist.get_rank() == 0)
    offset = inside[0][1]
    return select_rows(batch, np.arange(begin - offset, min(end - offset, len(batch))))
