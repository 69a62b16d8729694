"""Random ragged batches for the batching tests, and their streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from megatron_rl.batching import TokenStream, actor_stream, critic_stream


@dataclass(frozen=True)
class Ragged:
    """Recorded columns, flat over sequences, as `RolloutBatch` names them. Token ids are unique over the batch."""

    tokens: np.ndarray
    offsets: np.ndarray
    action_mask: np.ndarray
    boundary_tokens: np.ndarray
    boundary_offsets: np.ndarray
    truncated: np.ndarray

    def actor(self) -> TokenStream:
        """The policy's stream."""
        return actor_stream(self.tokens, self.offsets, self.action_mask)

    def critic(self) -> TokenStream:
        """The critic's stream."""
        raw = self.tokens, self.offsets, self.action_mask
        return critic_stream(*raw, self.boundary_tokens, self.boundary_offsets, self.truncated)


@st.composite
def ragged_batches(draw, max_sequences: int = 6, max_length: int = 20) -> Ragged:
    """Batches with sequences of 1 token, of no decision, all decisions, empty and filled boundaries."""
    lengths = draw(st.lists(st.integers(1, max_length), max_size=max_sequences))
    boundaries = [draw(st.integers(0, 3)) for _ in lengths]
    mask: list[bool] = []
    for n in lengths:
        kind = draw(st.sampled_from(["none", "all", "some"]))
        later = {"none": [False] * (n - 1), "all": [True] * (n - 1)}.get(kind)
        mask += [False, *(draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)) if later is None else later)]
    ids = np.random.default_rng(draw(st.integers(0, 99))).permutation(1000) + 1
    return Ragged(
        tokens=ids[: sum(lengths)].astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        action_mask=np.asarray(mask, bool),
        boundary_tokens=ids[-sum(boundaries) :][: sum(boundaries)].astype(np.int32),
        boundary_offsets=np.concatenate([[0], np.cumsum(boundaries)]).astype(np.int64),
        truncated=np.asarray([draw(st.booleans()) for _ in lengths], bool),
    )
