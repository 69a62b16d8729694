"""The input tokens of every sequence of a batch, and the positions at which outputs are read.

The log-prob, the entropy and the value of a token are read at the position before it, whose output predicts it. Only
`_decision_reads` knows that shift: everything downstream gathers by `reads` and `labels`.

A *slot* is an index into the flat result of a forward pass: the actor has one per decision; the critic has one per
decision, then one per sequence for the bootstrap value at a truncation.

Invariants:

* Every actor slot is read exactly once, in order; so is every decision slot of the critic.
* A bootstrap slot is read exactly once where the sequence is truncated, never elsewhere.
* A read position and the token it predicts belong to the same sequence.
* `labels` is the next token where an actor slot is read, -1 everywhere else.
* `route_rows` counts 0, 1, … over the raw tokens of a sequence and is -1 at its last raw token and at boundary tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import RolloutError


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens of B sequences, flat, T' in all, and the slot that is read at each."""

    tokens: np.ndarray
    """int32 [T']."""
    offsets: np.ndarray
    """int64 [B+1]: sequence b is [offsets[b], offsets[b+1])."""
    reads: np.ndarray
    """int64 [T']: slot whose value is read at this position, -1 for none."""
    labels: np.ndarray
    """int32 [T']: token whose log-prob is read at this position, -1 for none."""
    route_rows: np.ndarray
    """int64 [T']: row of the trajectory's recorded routes `[L, N-1, k]` for this position, -1 where none exists."""
    slots: int
    """Number of slots."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]: tokens of each sequence."""
        return np.diff(self.offsets)


def actor_stream(tokens: np.ndarray, offsets: np.ndarray, action_mask: np.ndarray) -> TokenStream:
    """The policy's stream: raw tokens; slot j is decision j, read at raw position q_j - 1 with label `tokens[q_j]`.

    Args:
        tokens: int [T], flat over B sequences.
        offsets: int [B+1].
        action_mask: bool [T], 1 where the policy sampled the token.

    Raises:
        RolloutError: a sequence begins with a sampled token, which no logits precede.
    """
    reads, labels = _decision_reads(tokens, offsets, action_mask)
    return TokenStream(
        tokens=np.asarray(tokens, np.int32),
        offsets=np.asarray(offsets, np.int64),
        reads=reads,
        labels=labels,
        route_rows=_route_rows(offsets),
        slots=int(np.count_nonzero(action_mask)),
    )


def critic_stream(
    tokens: np.ndarray,
    offsets: np.ndarray,
    action_mask: np.ndarray,
    boundary_tokens: np.ndarray,
    boundary_offsets: np.ndarray,
    truncated: np.ndarray,
) -> TokenStream:
    """The critic's stream: each sequence is its raw tokens, then its boundary tokens. All labels are -1.

    Slots are the D decisions, then B bootstrap values: slot D+b is V(s_boundary), the value at the last visible token
    of sequence b, and is read where `truncated[b]` only. Pass a truncated sequence of unknown boundary with `truncated`
    False, unless its last raw token is to be taken for the boundary.

    Args:
        tokens, offsets, action_mask: as in `actor_stream`.
        boundary_tokens: int [T_b], flat.
        boundary_offsets: int [B+1] into `boundary_tokens`.
        truncated: bool [B].

    Raises:
        RolloutError: a sequence begins with a sampled token, or an empty sequence is truncated.
    """
    offsets, boundary_offsets = np.asarray(offsets, np.int64), np.asarray(boundary_offsets, np.int64)
    raw_reads, _ = _decision_reads(tokens, offsets, action_mask)
    spliced = offsets + boundary_offsets
    raw_at = np.arange(offsets[-1]) + np.repeat(boundary_offsets[:-1], np.diff(offsets))
    boundary_at = np.arange(boundary_offsets[-1]) + np.repeat(offsets[1:], np.diff(boundary_offsets))
    all_tokens = np.empty(spliced[-1], np.int32)
    all_tokens[raw_at], all_tokens[boundary_at] = tokens, boundary_tokens
    reads, route_rows = np.full(spliced[-1], -1, np.int64), np.full(spliced[-1], -1, np.int64)
    reads[raw_at], route_rows[raw_at] = raw_reads, _route_rows(offsets)
    decisions = int(np.count_nonzero(action_mask))
    cut = _truncated_rows(truncated, spliced)
    reads[spliced[cut + 1] - 1] = decisions + cut
    labels = np.full(spliced[-1], -1, np.int32)
    return TokenStream(all_tokens, spliced, reads, labels, route_rows, slots=decisions + len(spliced) - 1)


def decision_offsets(action_mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [B+1]: decisions of sequence b are slots [result[b], result[b+1]).

    Args:
        action_mask: bool [T].
        offsets: int [B+1] into it.
    """
    before = np.concatenate([[0], np.cumsum(action_mask, dtype=np.int64)])
    return before[np.asarray(offsets, np.int64)]


def _decision_reads(tokens: np.ndarray, offsets: np.ndarray, action_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`reads` int64 [T] and `labels` int32 [T]: decision j, sampled as token q_j, is read at q_j - 1."""
    mask = np.asarray(action_mask, bool)
    _check_first_token(mask, offsets)
    sampled = np.flatnonzero(mask)
    reads, labels = np.full(len(mask), -1, np.int64), np.full(len(mask), -1, np.int32)
    reads[sampled - 1] = np.arange(len(sampled))
    labels[sampled - 1] = np.asarray(tokens)[sampled]
    return reads, labels


def _route_rows(offsets: np.ndarray) -> np.ndarray:
    """int64 [T]: position inside the sequence, -1 at its last token, which was never fed."""
    offsets = np.asarray(offsets, np.int64)
    lengths = np.diff(offsets)
    rows = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    rows[offsets[1:][lengths > 0] - 1] = -1
    return rows


def _check_first_token(mask: np.ndarray, offsets: np.ndarray) -> None:
    filled = np.flatnonzero(np.diff(offsets))
    bad = filled[mask[np.asarray(offsets)[filled]]]
    if len(bad):
        raise RolloutError(
            "the first token of a sequence has no logits before it and cannot be sampled",
            row=int(bad[0]),
            field="action_mask",
            found=True,
            expected=False,
        )


def _truncated_rows(truncated: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(truncated)
    empty = rows[np.diff(offsets)[rows] == 0]
    if len(empty):
        raise RolloutError(
            "a truncated sequence has no token to read a value at",
            row=int(empty[0]),
            field="tokens",
            found="0 tokens",
            expected="at least 1",
        )
    return rows
