"""Which episode a rollout process plays next: the task's episodes in order, as far as the trainer allows.

Invariants:

* An episode that is recorded in the stream is not played again; one that was lost with its process is.
* A block is of one level, also after a restart if anything of it is recorded: a group never mixes levels.
* Never more than `room` episodes are begun, those that have finished included, except to complete a group that was
  begun: an incomplete one could never be trained on.
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
    """An episode with its position in the run."""

    spec: EpisodeSpec
    block: int
    """Argument of `Task.training_specs` that it is from."""
    group_size: int
    """Episodes of its block and group."""
    level: int
    """Index of the task that it is from."""


class EpisodeScheduler:
    """Returns the episodes of a run, one at a time.

    Args:
        levels: a task for each level of the curriculum.
        level_of: level of a block, called once for each, when its first episode comes next.
        block_size: episodes of one block of `Task.training_specs`.
        recorded: trajectory ids in the stream.
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
        """Episodes that may have begun since the run began."""

    async def allow(self, room: int) -> None:
        """Set `room`."""
        if room != self.room:
            async with self._changed:
                self.room = room
                self._changed.notify_all()

    async def take(self) -> ScheduledEpisode | None:
        """Wait until there is room, and return the next episode; None: `limit` episodes have begun."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or self.begun < self.room or self._inside_group)
            if self._ended:
                return None
            self.begun += 1
            self._last, self._next = self._next, next(self._specs)
            return self._last

    async def give_back(self) -> None:
        """Count an episode that had begun as not begun: it left nothing to record, and another may begin."""
        async with self._changed:
            self.begun -= 1
            self._changed.notify_all()

    @property
    def starved(self) -> bool:
        """Whether no episode can begin until the trainer gives more room."""
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
        first = {spec.group_id: i for i, spec in reversed(list(enumerate(specs)))}
        for spec in sorted(specs, key=lambda spec: first[spec.group_id]):
            yield ScheduledEpisode(spec, block, sizes[spec.group_id], level)
