"""What a rollout process plays next: the task's episodes in order, as far as the trainer gives room.

Invariants:

* An episode that lies recorded in the stream is not played again; one that was lost with its process is.
* A block is of one level, also after a restart if anything of it is recorded: a group never mixes levels.
* Never more than `room` episodes are begun, those that finished long ago included, but a group that was begun is begun
  whole: an incomplete one could never be trained on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.environments.base import EpisodeSpec, Task


@dataclass(frozen=True)
class ScheduledEpisode:
    """An episode of the scheduler."""

    spec: EpisodeSpec
    block: int
    """Argument of `Task.training_specs` that it is from."""
    group_size: int
    """Episodes of its block and group."""
    level: int
    """Place of the task that it is from."""


class EpisodeScheduler:
    """Hands out the episodes of a run, one at a time.

    Args:
        levels: what is played, a task for each level.
        level_of: level of a block, asked once for each, when its first episode comes next.
        block_size: episodes of one block of `Task.training_specs`.
        recorded: trajectory ids that lie in the stream.
        limit: most episodes ever begun; None: no end.
    """

    def __init__(
        self,
        levels: Sequence[Task],
        level_of: Callable[[int], int],
        block_size: int,
        recorded: Collection[str],
        limit: int | None,
    ) -> None:
        planned = _planned(levels, level_of, block_size)
        self._specs = (found for found in planned if found.spec.trajectory_id not in recorded)
        self._next = next(self._specs)
        self._last: ScheduledEpisode | None = None
        self._limit = limit
        self._changed = asyncio.Condition()
        self.begun = len(recorded)
        """Episodes recorded or in flight."""
        self.room = 0

    async def allow(self, room: int) -> None:
        """Room for so many episodes since the run began."""
        if room != self.room:
            async with self._changed:
                self.room = room
                self._changed.notify_all()

    async def take(self) -> ScheduledEpisode | None:
        """The next episode, once there is room for it; None: all that was wanted has begun."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or self.begun < self.room or self._inside_group)
            if self._ended:
                return None
            self.begun += 1
            self._last, self._next = self._next, next(self._specs)
            return self._last

    async def give_back(self) -> None:
        """An episode that had begun left nothing behind: another may begin."""
        async with self._changed:
            self.begun -= 1
            self._changed.notify_all()

    @property
    def starved(self) -> bool:
        """Whether the trainer gives no room for more."""
        return not self._ended and self.begun >= self.room and not self._inside_group

    @property
    def _ended(self) -> bool:
        return self._limit is not None and self.begun >= self._limit and not self._inside_group

    @property
    def _inside_group(self) -> bool:
        last, following = self._last, self._next
        return last is not None and (last.block, last.spec.group_id) == (following.block, following.spec.group_id)


def _planned(levels: Sequence[Task], level_of: Callable[[int], int], block_size: int) -> Iterator[ScheduledEpisode]:
    for block in itertools.count():
        level = level_of(block)
        specs = levels[level].training_specs(block, block_size)
        sizes = Counter(spec.group_id for spec in specs)
        first = {spec.group_id: place for place, spec in reversed(list(enumerate(specs)))}
        for spec in sorted(specs, key=lambda spec: first[spec.group_id]):
            yield ScheduledEpisode(spec, block, sizes[spec.group_id], level)
