"""Which recorded trajectories each iteration was trained on, so that every trajectory is trained on exactly once.

`consumed.jsonl` in the run directory has a line an iteration, written before its first optimizer step:

    {"iteration": 3, "version": 3, "shards": [["rollouts/iteration-000003/rank-00000.arrow", [0, 1, 2]], …]}

The checkpoint holds the number of lines up to it and a chained checksum of them. After a crash the lines beyond are
what the lost iterations were trained on: the resumed run reads the same trajectories for them, so none is skipped
and none is given to another iteration as well. A run can also be replayed from the file alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_rl.errors import CheckpointError, RolloutError
from megatron_rl.files import make_durable, write_text
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import read_batch, select_rows

NAME = "consumed.jsonl"


@dataclass(frozen=True)
class Entry:
    """The trajectories of one iteration, in the order they were trained on."""

    iteration: int
    version: int
    """Weight version before the iteration's first step."""
    shards: tuple[tuple[str, tuple[int, ...]], ...]
    """(shard file below the run directory, rows), in order; a shard may come up again."""

    @classmethod
    def of(cls, iteration: int, version: int, batch: RolloutBatch, directory: Path) -> Entry:
        """What a batch was read from."""
        pieces = groupby(batch.sources, key=lambda source: source[0])
        shards = ((_below(file, directory), tuple(row for _, row in rows)) for file, rows in pieces)
        return cls(iteration, version, tuple(shards))

    def rows(self) -> Iterable[tuple[str, int]]:
        """(shard, row) of every trajectory."""
        return ((file, row) for file, rows in self.shards for row in rows)


class Ledger:
    """The entries of a run. Every rank holds the same; one writes.

    Args:
        directory: the run directory.
        writes: whether this rank writes the file.
    """

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self.path = directory / NAME
        self._directory, self._writes = directory, writes
        self._lines: list[str] = []
        self._checksum = ""
        self.last: Entry | None = None
        """The newest entry."""
        self._planned: dict[int, Entry] = {}
        self._seen: set[tuple[str, int]] = set()
        self._stale = True
        """Whether the file holds lines that are not this run's: of a run before, or plans that were not followed."""

    def planned(self, iteration: int) -> Entry | None:
        """What a lost run had trained this iteration on, or None."""
        return self._planned.get(iteration)

    def consume(self, entry: Entry) -> None:
        """Note what the next iteration trains on, durably, before it does.

        Raises:
            RolloutError: a trajectory was trained on before; the data would be used twice.
        """
        self._refuse_repeated(entry)
        self._add(entry)
        if self._planned.pop(entry.iteration, None) == entry:
            return
        # Another history begins: what a lost run went on to is not what this one will.
        self._stale |= bool(self._planned)
        self._planned.clear()
        if self._writes:
            self._write()
        self._stale = False

    def state(self) -> dict[str, Any]:
        """For the checkpoint: entries so far and their chained checksum."""
        return {"entries": len(self._lines), "checksum": self._checksum}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the state of the checkpoint; later lines of the file become plans.

        Raises:
            CheckpointError: the file is not the one the checkpoint was written beside.
        """
        entries = read_entries(self.path)
        past, later = entries[: state["entries"]], entries[state["entries"] :]
        for entry in past:
            self._add(entry)
        if self.state() != state:
            raise CheckpointError(
                "the record of consumed rollouts is not the one this checkpoint was saved with",
                file=self.path,
                found=self.state(),
                expected=state,
                setting="output: continue in the run directory the checkpoint belongs to",
            )
        self._planned = {entry.iteration: entry for entry in later}
        self._stale = _torn(self.path)

    def _refuse_repeated(self, entry: Entry) -> None:
        for file, row in entry.rows():
            if (file, row) in self._seen:
                raise RolloutError(
                    "trajectory was trained on before",
                    file=self._directory / file,
                    row=row,
                    found=f"again in iteration {entry.iteration}",
                    expected="each recorded trajectory once",
                )

    def _add(self, entry: Entry) -> None:
        self.last = entry
        self._lines.append(_line(entry))
        self._checksum = xxhash.xxh3_128((self._checksum + self._lines[-1]).encode()).hexdigest()
        self._seen.update(entry.rows())

    def _write(self) -> None:
        if self._stale:
            write_text(self.path, "".join(self._lines))
            return
        with open(self.path, "a") as stream:
            stream.write(self._lines[-1])
        make_durable(self.path)


def read_entries(path: Path) -> list[Entry]:
    """All entries of a ledger file; none where there is no file.

    Raises:
        RolloutError: a line is not an entry.
    """
    text = path.read_text() if path.exists() else ""
    entries = []
    # The last line of a writer that died may be torn: that iteration had not begun to train.
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines()):
        try:
            found = json.loads(line)
            shards = tuple((file, tuple(rows)) for file, rows in found["shards"])
            entries.append(Entry(found["iteration"], found["version"], shards))
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError("no entry of consumed rollouts", file=path, row=number, found=error) from error
    return entries


def reread(entry: Entry, directory: Path) -> RolloutBatch:
    """The batch of an entry, trajectories in its order.

    Args:
        entry: what to read.
        directory: the run directory its files are below.

    Raises:
        RolloutError: a shard or a row is not there any more.
    """
    files = sorted({file for file, _ in entry.shards})
    batch = read_batch([directory / file for file in files], verify_checksums=False)
    place = {(_below(file, directory), row): b for b, (file, row) in enumerate(batch.sources)}
    try:
        return select_rows(batch, np.array([place[key] for key in entry.rows()], np.int64))
    except KeyError as error:
        raise RolloutError(
            "a consumed trajectory is not in its shard", file=directory, found=f"no {error.args[0]}"
        ) from error


def _below(file: str, directory: Path) -> str:
    path = Path(file).resolve()
    root = directory.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _torn(path: Path) -> bool:
    return path.exists() and not path.read_bytes().endswith(b"\n")


def _line(entry: Entry) -> str:
    return json.dumps({"iteration": entry.iteration, "version": entry.version, "shards": entry.shards}) + "\n"
