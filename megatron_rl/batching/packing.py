"""Which sequences share a micro-batch, on which data rank, and how many micro-batches there are.

Invariants:

* Every planned row is in exactly one micro-batch.
* Every data rank has the same number M of micro-batches, a positive multiple of `count_multiple`.
* Padded tokens of every micro-batch are at most `length`, and `length` is at most `token_budget` rounded up to a
  multiple of 2·cp·tp (of tp when cp is 1).
* M is at most twice the smallest possible one, rounded up to `count_multiple`.
* While the budget does not bind, the costliest rank costs at most 4/3 of the best possible (Graham 1969).
* A rank's micro-batches are in order of falling cost: under expert parallelism data ranks wait for each other within a
  micro-batch, so that those of equal index should cost alike.
* The plan is a function of the arguments alone: all ranks compute the same one without communication.

Minibatches (`split_minibatches`) hold each row once, and their sizes differ by at most one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.batching.layout import length_multiple, round_up, segment_lengths
from megatron_rl.errors import ConfigError


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens: linear·n + quadratic·n², in any unit. Both coefficients are at least 0."""

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def for_model(cls, *, hidden: int, heads: int, kv_heads: int, head_dim: int, active_ffn: int) -> CostModel:
        """Forward FLOPs of one decoder layer, two per multiply-add; the number of layers scales both terms equally.

        Linear, per token: 2·h·d·(2·heads + 2·kv_heads) for the four attention projections and 2·3·h·f for a gated
        MLP. Quadratic, per pair: scores and weighted sum take 2·2·heads·d for each of the n²/2 causal pairs.
        Backward is twice the forward for both terms. Left out: router, norms, and the output layer, which only the
        last pipeline stage has.

        Args:
            hidden: h.
            heads, kv_heads, head_dim: query heads, key/value heads and their width d.
            active_ffn: f, the intermediate width of one token: top-k · expert width + shared-expert width, or the width
                of a dense layer.
        """
        projections = 2 * hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(linear=float(projections + 6 * hidden * active_ffn), quadratic=float(2 * heads * head_dim))

    def cost(self, n: int) -> float:
        """Cost of one sequence of n tokens."""
        return self.linear * n + self.quadratic * n * n


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of every data rank in one optimizer step."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    """`[data rank][micro-batch]` → rows, ascending; M micro-batches on every rank; an empty tuple is all padding."""
    length: int
    """S: tokens of every micro-batch of the step over all its context shards, padding included."""

    @property
    def count(self) -> int:
        """M: micro-batches of every data rank."""
        return len(self.assignment[0])


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    *,
    token_budget: int,
    data_ranks: int,
    cp: int,
    tp: int,
    cost: CostModel,
    count_multiple: int = 1,
    rows: Sequence[int] | np.ndarray | None = None,
    pad_each_to: int | None = None,
) -> MicroBatchPlan:
    """Spread sequences over data ranks by cost and over micro-batches by tokens.

    Longest first, each row goes to the rank of least cost with room for it (longest processing time first, Graham 1969)
    and there to the emptiest micro-batch, which keeps S small. Where some row finds no room that way, rows go to the
    fullest micro-batch with room instead. M starts at the smallest count that could hold all tokens and grows until
    every row has a place.

    Args:
        lengths: int [B], tokens of each sequence of the stream.
        token_budget: tokens of one micro-batch over all its context shards, padding included.
        data_ranks: number of data-parallel ranks.
        cp, tp: context- and tensor-parallel sizes.
        cost: quantity in which data ranks are balanced.
        count_multiple: M is a multiple of it (the pipeline size under interleaving).
        rows: the rows to plan (a minibatch), all of them by default.
        pad_each_to: common padded length of every sequence, for unpacked layouts.

    Raises:
        ConfigError: a sequence, or `pad_each_to`, is longer than the budget, or `pad_each_to` does not suit the
            sequences.
    """
    lengths = np.asarray(lengths, np.int64)
    chosen = np.arange(len(lengths)) if rows is None else np.asarray(rows, np.int64)
    multiple = length_multiple(cp, tp)
    capacity = round_up(token_budget, multiple)
    _check_budget(lengths, chosen, token_budget, capacity, pad_each_to)
    chosen = chosen[np.lexsort((chosen, -lengths[chosen]))]
    items = [
        _Item(int(row), int(size), cost.cost(int(lengths[row])))
        for row, size in zip(chosen, segment_lengths(lengths[chosen], cp, pad_each_to), strict=True)
    ]
    ranks = _smallest_packing(items, capacity, data_ranks, count_multiple)
    longest = max(box.tokens for boxes in ranks for box in boxes)
    assignment = tuple(
        tuple(tuple(sorted(box.rows)) for box in sorted(boxes, key=lambda box: -box.cost)) for boxes in ranks
    )
    return MicroBatchPlan(assignment, length=max(round_up(longest, multiple), multiple))


def split_minibatches(
    num_rows: int, minibatches: int, seed: int, epoch: int, keys: Sequence[str] | Sequence[int] | None = None
) -> list[np.ndarray]:
    """Shuffle rows and cut them into minibatches whose sizes differ by at most one.

    Args:
        num_rows: B.
        minibatches: number of parts; with more parts than rows the last ones are empty.
        seed, epoch: at least 0; together they determine the shuffle.
        keys: B unique, sortable names of the rows (trajectory ids). With them the split depends on the set of rows and
            not on their order.

    Returns:
        `minibatches` arrays int64 of rows, in shuffled order.

    Raises:
        ConfigError: fewer than one minibatch.
    """
    if minibatches < 1:
        raise ConfigError("no minibatch", found=minibatches, expected="at least 1", setting="algorithm.minibatches")
    canonical = range(num_rows) if keys is None else sorted(range(num_rows), key=keys.__getitem__)
    # Raw words, not Generator.permutation: numpy guarantees their stream across versions, and a resume must repeat it.
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    shuffled = np.asarray(canonical, np.int64)[np.argsort(words, kind="stable")]
    return np.array_split(shuffled, minibatches)


@dataclass(frozen=True)
class _Item:
    row: int
    tokens: int
    """Padded."""
    cost: float


@dataclass
class _Box:
    """A micro-batch being filled."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    """Padded."""
    cost: float = 0.0

    def add(self, item: _Item) -> None:
        self.rows.append(item.row)
        self.tokens += item.tokens
        self.cost += item.cost


def _smallest_packing(items: list[_Item], capacity: int, data_ranks: int, count_multiple: int) -> list[list[_Box]]:
    """[data rank][M] boxes, M the first multiple of `count_multiple` at which every item finds a place."""
    total = sum(item.tokens for item in items)
    count = round_up(max(1, -(-total // (capacity * data_ranks))), count_multiple)
    while True:
        for fullest_first in (False, True):
            ranks = _pack(items, capacity, data_ranks, count, fullest_first)
            if ranks is not None:
                return ranks
        count += count_multiple


def _pack(
    items: list[_Item], capacity: int, data_ranks: int, count: int, fullest_first: bool
) -> list[list[_Box]] | None:
    """Place items, longest first, each on the cheapest rank with room; None if one finds no room anywhere."""
    ranks = [[_Box() for _ in range(count)] for _ in range(data_ranks)]
    loads = [0.0] * data_ranks
    for item in items:
        for rank in sorted(range(data_ranks), key=loads.__getitem__):
            box = _choose_box(ranks[rank], capacity - item.tokens, fullest_first)
            if box is not None:
                box.add(item)
                loads[rank] += item.cost
                break
        else:
            return None
    return ranks


def _choose_box(boxes: list[_Box], room_for: int, fullest_first: bool) -> _Box | None:
    """The emptiest or the fullest box among those holding at most `room_for` tokens, the first of equals."""
    open_boxes = [box for box in boxes if box.tokens <= room_for]
    if not open_boxes:
        return None
    return max(open_boxes, key=lambda box: box.tokens) if fullest_first else min(open_boxes, key=lambda box: box.tokens)


def _check_budget(
    lengths: np.ndarray, rows: np.ndarray, token_budget: int, capacity: int, pad_each_to: int | None
) -> None:
    too_long = rows[lengths[rows] > token_budget]
    if len(too_long):
        row = int(too_long[0])
        raise ConfigError(
            "a sequence is longer than a micro-batch",
            row=row,
            field="tokens",
            found=f"{int(lengths[row])} tokens",
            expected=f"at most {token_budget}",
            setting="batching.token_budget",
        )
    if token_budget < 1 or (pad_each_to or 0) > capacity:
        raise ConfigError(
            "the token budget does not hold one sequence",
            found=token_budget,
            expected=f"at least {pad_each_to or 1}",
            setting="batching.token_budget",
        )
