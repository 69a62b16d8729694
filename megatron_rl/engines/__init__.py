"""Who generates rollouts: engines take and return exact token ids, and `episodes` plays environments with them.

Axis letters: B prompts, P tokens of a prompt, n tokens generated for it, L MoE layers, k top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Generation:
    """What one model call sampled after one prompt. Written by engines, read by `episodes`."""

    tokens: np.ndarray
    """int32 [n], n >= 1: sampled ids; the stop token that ended the call is the last of them."""
    logprobs: np.ndarray
    """float32 [n], nats: log-prob of each token under the temperature-scaled distribution."""
    routes: np.ndarray | None
    """uint8 or uint16 [L, P + n - 1, k]: experts used for every fed token, prompt included; None: not recorded."""
    version: int
    """Weight version that sampled all n tokens."""
    interrupted: bool = False
    """An update of the weights ended the call early: the action goes on with a call on prompt + tokens."""


class TokenEngine(Protocol):
    """The one call that `episodes` needs from an engine."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        greedy: bool = False,
        streams: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Continue B prompts; each result belongs to the prompt at the same place.

        Args:
            streams: B numbers below 2^64, each the name of its prompt's randomness: the same name samples the same
                tokens from the same distributions, whatever shares the batch. None: names that were not used before.
        """
        ...


class AsyncTokenEngine(Protocol):
    """The one call that the concurrent episode player needs from an engine: many may be awaited at once."""

    async def agenerate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool = False
    ) -> Generation:
        """Continue one prompt.

        Returns:
            A generation sampled by one weight version. `interrupted`: fewer tokens than asked for and no stop token,
            because the weights changed; never empty.

        Raises:
            EngineError: no usable answer after the engine's own attempts; `retriable` says whether another call may
                succeed.
        """
        ...
