"""Which replica has computed a prompt's beginning before, so that an episode's next turn finds its stored prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import xxhash

Owner = TypeVar("Owner")


class PrefixAffinity(Generic[Owner]):
    """Remembers sequences by the hash of their whole blocks; the least recently used are dropped beyond `capacity`.

    Args:
        block: tokens per block; prefixes are distinguished at multiples of it, as in vLLM's own cache.
        capacity: sequences remembered.
    """

    def __init__(self, block: int = 16, capacity: int = 65_536) -> None:
        self._block, self._capacity = block, capacity
        self._owners: OrderedDict[int, Owner] = OrderedDict()

    def remember(self, tokens: Sequence[int], owner: Owner) -> None:
        """Note that `owner` has computed these tokens."""
        hashes = self._hashes(tokens)
        if hashes:
            self._owners[hashes[-1]] = owner
            self._owners.move_to_end(hashes[-1])
            if len(self._owners) > self._capacity:
                self._owners.popitem(last=False)

    def find(self, tokens: Sequence[int]) -> Owner | None:
        """The owner of the longest remembered beginning of these tokens; None: of no beginning."""
        return next((self._owners[key] for key in reversed(self._hashes(tokens)) if key in self._owners), None)

    def clear(self) -> None:
        """Drop everything: no replica has stored prefixes any more."""
        self._owners.clear()

    def _hashes(self, tokens: Sequence[int]) -> list[int]:
        """One hash for each number of whole blocks, in one pass."""
        whole = len(tokens) // self._block * self._block
        blocks = np.asarray(tokens[:whole], np.int32).reshape(-1, self._block)
        state, hashes = xxhash.xxh3_64(), []
        for block in blocks:
            state.update(block.tobytes())
            hashes.append(state.intdigest())
        return hashes
