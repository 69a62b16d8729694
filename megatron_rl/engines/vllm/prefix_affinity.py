"""Which replica has fed a prompt's beginning before, so that an episode's next turn finds its stored prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import xxhash

Place = TypeVar("Place")


class PrefixAffinity(Generic[Place]):
    """Remembers sequences by the hash of their whole blocks; the least recently used are dropped beyond `capacity`.

    Args:
        block: tokens per block; prefixes are told apart at multiples of it, as in vLLM's own cache.
        capacity: sequences remembered.
    """

    def __init__(self, block: int = 16, capacity: int = 65_536) -> None:
        self._block, self._capacity = block, capacity
        self._places: OrderedDict[int, Place] = OrderedDict()

    def remember(self, tokens: Sequence[int], place: Place) -> None:
        """`place` has fed these tokens."""
        hashes = self._hashes(tokens)
        if hashes:
            self._places[hashes[-1]] = place
            self._places.move_to_end(hashes[-1])
            if len(self._places) > self._capacity:
                self._places.popitem(last=False)

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Who fed the longest remembered beginning of these tokens."""
        return next((self._places[key] for key in reversed(self._hashes(tokens)) if key in self._places), None)

    def forget(self) -> None:
        """Stored prefixes are gone."""
        self._places.clear()

    def _hashes(self, tokens: Sequence[int]) -> list[int]:
        """One hash for each number of whole blocks, in one pass."""
        whole = len(tokens) // self._block * self._block
        blocks = np.asarray(tokens[:whole], np.int32).reshape(-1, self._block)
        state, hashes = xxhash.xxh3_64(), []
        for block in blocks:
            state.update(block.tobytes())
            hashes.append(state.intdigest())
        return hashes
