"""Inference engines: they take and return exact token ids; `episodes` plays environments with them.

Axis letters: B prompts, P tokens of a prompt, n tokens generated for it, L MoE layers, k top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Generation:
    """What one engine call sampled after one prompt. Written by engines, read by `episodes`."""

    tokens: np.ndarray
    """int32 [n], n >= 1: sampled ids; the stop token that ended the call is the last of them."""
    logprobs: np.ndarray
    """float32 [n], nats: log-prob of each token under the temperature-scaled distribution."""
    routes: np.ndarray | None
    """uint8 or uint16 [L, P + n - 1, k]: experts used for every input token, prompt included; None: not recorded."""
    version: int
    """Weight version that sampled all n tokens."""
    interrupted: bool = False
    """A weight update ended the call early; the action is continued by a call on prompt + tokens."""


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
        """Continue B prompts until a stop token or `max_new_tokens`.

        Args:
            prompts: B non-empty lists of token ids.
            max_new_tokens: most tokens to sample for each, >= 1.
            stop_tokens: ids that end a prompt's generation.
            greedy: take the most likely token instead of sampling.
            streams: B numbers below 2^64, each naming a prompt's stream of random numbers: the same stream samples the
                same tokens from the same distributions, whatever shares the batch. None: streams not used before.

        Returns:
            B generations, in the order of the prompts.
        """
        ...


class AsyncTokenEngine(Protocol):
    """The one call that `episodes.concurrent` needs from an engine: many may be awaited at once."""

    async def agenerate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int], greedy: bool = False
    ) -> Generation:
        """Continue one prompt; the arguments are those of `TokenEngine.generate`.

        Returns:
            A generation sampled by one weight version, never empty. If it is `interrupted`, it has fewer tokens than
            requested and no stop token, because the weights changed.

        Raises:
            EngineError: no usable generation after the engine's own attempts; `retriable` says whether another call
                may succeed.
        """
        ...
