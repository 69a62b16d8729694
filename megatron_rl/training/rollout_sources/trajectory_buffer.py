"""Which recorded trajectories of a stream wait to be trained on, and which of them an iteration takes.

Invariants:

* A trajectory is given out at most once; those in `taken` never are.
* Nothing younger than the trainer's weights is taken (a trainer that resumed catches up first), and with `drop` nothing
  whose oldest token is more than `staleness` versions behind them.
* The oldest come first, of equals those that finished first. With `whole_groups`, groups are taken whole.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import read_batch, shard_paths

_NEVER = np.iinfo(np.int32).max
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One recorded trajectory."""

    file: str
    """Shard, below the run directory."""
    row: int
    group: str
    """Trajectories played together."""
    size: int
    """How many of them there are."""
    oldest: int
    """Smallest weight version that sampled one of its tokens; without any it is never too old."""
    newest: int
    """Greatest one; -1 without any."""


class TrajectoryBuffer:
    """The trajectories in a directory of shard directories that wait to be trained on. Rank 0's alone is used.

    Args:
        output: the run directory.
        stream: directory of shard directories, both filled in the order of names.
        taken: (shard, row) of trajectories that were trained on, or are planned to be.
        skip_damaged: leave out shards that fail their checksum instead of raising.
    """

    def __init__(self, output: Path, stream: Path, taken: Iterable[tuple[str, int]], *, skip_damaged: bool) -> None:
        self._output, self._stream, self._taken = output, stream, set(taken)
        self._skip_damaged = skip_damaged
        self._seen: set[Path] = set()
        self._discarded_groups: set[str] = set()
        """Groups of which a member was discarded."""
        self._folder = ""
        self.waiting: list[Row] = []
        """In the order they were found."""
        self.found = self.tokens = self.bytes = 0
        """Trajectories, tokens and bytes of all shards found."""
        self.expired = 0
        """Trajectories discarded: too old, in a damaged shard, or of groups that cannot become complete."""

    def scan(self) -> None:
        """Find what was committed since the last scan.

        Raises:
            RolloutError: a committed shard is torn or damaged.
        """
        for folder in sorted(path for path in self._stream.glob("*") if path.is_dir() and path.name >= self._folder):
            for shard in shard_paths(folder):
                if shard not in self._seen:
                    self._seen.add(shard)
                    self._add(shard)
            self._folder = folder.name

    def take(self, count: int, version: int, staleness: int, *, whole_groups: bool, drop: bool) -> list[Row]:
        """Give out at least `count` trajectories, or none if there are not enough; `choose` decides which."""
        chosen, expired = choose(
            self.waiting, count=count, version=version, staleness=staleness, whole_groups=whole_groups, drop=drop,
            discarded=self._discarded_groups,
        )  # fmt: skip
        self._discarded_groups |= {row.group for row in expired} if whole_groups else set()
        gone = {(row.file, row.row) for row in (*chosen, *expired)}
        self._taken |= gone
        self.waiting = [row for row in self.waiting if (row.file, row.row) not in gone]
        self.expired += len(expired)
        return chosen

    def discard_incomplete_groups(self) -> None:
        """Discard groups that lack a member, and what may come of them later. Only where nothing is in flight."""
        present = Counter(row.group for row in self.waiting)
        incomplete = [row for row in self.waiting if present[row.group] < row.size]
        if not incomplete:
            return
        self._discarded_groups |= {row.group for row in incomplete}
        self._taken |= {(row.file, row.row) for row in incomplete}
        self.waiting = [row for row in self.waiting if present[row.group] >= row.size]
        self.expired += len(incomplete)
        _log.warning("%d trajectories are discarded: others of their groups could not be played", len(incomplete))

    def _add(self, shard: Path) -> None:
        try:
            batch = read_batch([shard])
        except RolloutError as error:
            if not self._skip_damaged:
                raise
            _log.warning("left out: %s", error)
            # Its trajectories will never be trained on: others may be played in their place.
            lost = int(json.loads(shard.with_name(f"{shard.name}.json").read_text())["rows"])
            self.found, self.expired = self.found + lost, self.expired + lost
            return
        self.found += len(batch)
        self.tokens += len(batch.tokens)
        self.bytes += shard.stat().st_size
        file = str(shard.relative_to(self._output))
        self.waiting += [row for row in rows_of(batch, file) if (file, row.row) not in self._taken]


def rows_of(batch: RolloutBatch, file: str) -> list[Row]:
    """What is known of each trajectory of a shard. Records that say nothing of a group are groups of their own."""
    rows = []
    for row in range(len(batch)):
        tokens = slice(batch.offsets[row], batch.offsets[row + 1])
        versions = batch.version[tokens][batch.action_mask[tokens]]
        metadata = batch.metadata[row] if batch.metadata else {}
        grouped = "group_size" in metadata and "block" in metadata
        rows.append(
            Row(
                file=file,
                row=row,
                group=f"{metadata['block']}/{batch.group_ids[row]}" if grouped else f"{file}/{row}",
                size=metadata["group_size"] if grouped else 1,
                oldest=int(versions.min()) if len(versions) else _NEVER,
                newest=int(versions.max()) if len(versions) else -1,
            )
        )
    return rows


def choose(
    waiting: Sequence[Row], *, count: int, version: int, staleness: int, whole_groups: bool, drop: bool,
    discarded: Collection[str] = (),
) -> tuple[list[Row], list[Row]]:  # fmt: skip
    """(trajectories to train on, trajectories to discard).

    Args:
        waiting: in the order they were found.
        count: how many are wanted; the last whole group may exceed it. Fewer are not taken.
        version: weight version that trains.
        staleness: versions it may be ahead of a trajectory's oldest token.
        whole_groups: take groups whole.
        drop: discard what is too old; of a group that has a member too old, those that are there.
        discarded: groups discarded before: what comes of them later is discarded too.
    """
    groups: dict[str, list[Row]] = {}
    for row in waiting:
        groups.setdefault(row.group if whole_groups else f"{row.file}/{row.row}", []).append(row)
    too_old = {key for key, group in groups.items() if drop and min(row.oldest for row in group) < version - staleness}
    too_old |= groups.keys() & set(discarded)
    expired = [row for key in groups if key in too_old for row in groups[key]]
    usable = [
        group
        for key, group in groups.items()
        if key not in too_old
        and max(row.newest for row in group) <= version
        and (not whole_groups or len(group) >= group[0].size)
    ]
    chosen: list[Row] = []
    for group in sorted(usable, key=lambda group: min(row.oldest for row in group)):
        if len(chosen) >= count:
            break
        chosen += group
    return (chosen if len(chosen) >= count else []), expired
