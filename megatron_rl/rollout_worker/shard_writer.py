"""Writes finished trajectories to the stream of shards, in small whole files, and waits while the disk is full."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts.schema import RolloutHeader, Trajectory
from megatron_rl.rollouts.store import is_committed, open_shard, shard_paths, write_shard

SHARDS_PER_FOLDER = 256
"""A folder's manifest is rewritten with each shard."""
RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class ShardWriter:
    """Buffers trajectories and writes them as shards.

    While a shard cannot be written, `add` waits, so that the buffer stays small.

    Args:
        stream: directory of shard directories.
        header: of all shards.
        episodes: trajectories of a shard.
        seconds: age of the oldest buffered trajectory after which a smaller shard is written.
        patience: seconds for which a write that the file system refuses is retried.
    """

    def __init__(self, stream: Path, header: RolloutHeader, *, episodes: int, seconds: float, patience: float) -> None:
        self._stream, self._header = stream, header
        self._episodes, self._seconds, self._patience = episodes, seconds, patience
        self._buffer: list[Trajectory] = []
        self._since = 0.0
        self._lock = asyncio.Lock()
        self._number = _next_number(stream)
        self.written = 0
        """Trajectories written by this writer."""
        self.problem = ""
        """Why the last write failed; empty: it did not."""

    @property
    def buffered(self) -> int:
        """Trajectories that are in no shard yet."""
        return len(self._buffer)

    async def add(self, trajectory: Trajectory) -> None:
        """Take a finished trajectory; one without tokens, whose environment failed to start, is left out.

        Raises:
            RolloutError: see `flush`.
        """
        if not len(trajectory.tokens):
            _log.warning("episode %s left nothing to record: %s", trajectory.trajectory_id, _why(trajectory))
            return
        async with self._lock:
            if not self._buffer:
                self._since = time.monotonic()
            self._buffer.append(trajectory)
            if len(self._buffer) >= self._episodes:
                await self._write()

    async def flush(self, *, force: bool = False) -> None:
        """Write the buffer if its oldest trajectory is older than `seconds`. To be called regularly.

        Args:
            force: write it whatever its age.

        Raises:
            RolloutError: the file system has refused for longer than `patience`, or a trajectory does not fit the
                shard's schema.
        """
        async with self._lock:
            if self._buffer and (force or time.monotonic() - self._since >= self._seconds):
                await self._write()

    async def _write(self) -> None:
        folder = self._stream / f"{self._number // SHARDS_PER_FOLDER:05d}"
        name = f"{self._number:08d}"
        start = time.monotonic()
        while True:
            try:
                await asyncio.to_thread(_write_once, folder, self._header, list(self._buffer), name)
                break
            except RolloutError as error:
                # Only errors of the file system may pass; a trajectory that does not fit its schema never will.
                if not isinstance(error.__cause__, OSError) or time.monotonic() - start > self._patience:
                    raise
                self.problem = str(error)
                _log.warning("a shard was not written, next attempt in %g s: %s", RETRY_SECONDS, error)
            await asyncio.sleep(RETRY_SECONDS)
        self._number += 1
        self.written += len(self._buffer)
        self.problem = ""
        self._buffer.clear()


def _why(trajectory: Trajectory) -> str:
    return str(trajectory.metadata.get("error", trajectory.outcome))


def _write_once(folder: Path, header: RolloutHeader, trajectories: list[Trajectory], name: str) -> None:
    # An attempt may have failed after the shard was committed, at the folder's manifest: then nothing is left to do.
    if not is_committed(folder, name):
        write_shard(folder, header, trajectories, name=name)


def recorded_ids(stream: Path) -> set[str]:
    """Trajectory ids of all committed shards; no other column is read."""
    ids: set[str] = set()
    for shard in shard_paths(stream, folders="*"):
        _, batches = open_shard(shard)
        ids.update(name for batch in batches for name in batch.column("trajectory_id").to_pylist())
    return ids


def _next_number(stream: Path) -> int:
    return max((int(shard.stem) + 1 for shard in shard_paths(stream, folders="*")), default=0)
