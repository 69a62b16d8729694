"""Expert routes of a rollout: storage type, missing rows, layer map, padding, agreement (R3, arXiv 2510.11370).

Axis letters: L MoE layers, N tokens of a trajectory, k top-k, E experts. Routes are layer-major `[L, N-1, k]`, so the
layers of one pipeline stage are one contiguous run of bytes.

Invariants:

* Ids are unsigned, of the smallest type that holds E ids and one value more: its largest value marks a missing row.
* A row is missing when *all* its k ids are that value; a row with some of them is damaged.
* Padding rows hold k distinct valid ids, and every expert receives the same number of padding slots, give or take one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.errors import RouteError
from megatron_rl.rollouts._mapping import prefetch


def route_dtype(num_experts: int) -> np.dtype:
    """Storage type of expert ids: uint8 up to 255 experts, uint16 up to 65535.

    Raises:
        RouteError: more experts than uint16 can name beside the missing-row value, or a negative count.
    """
    for dtype in (np.dtype(np.uint8), np.dtype(np.uint16)):
        if 0 <= num_experts <= missing_sentinel(dtype):
            return dtype
    raise RouteError("no route type for this expert count", field="num_experts", found=num_experts, expected="0..65535")


def missing_sentinel(dtype: np.dtype | type) -> int:
    """Value that marks a missing row: the largest of the unsigned `dtype`."""
    return int(np.iinfo(dtype).max)


def missing_rows(routes: np.ndarray) -> np.ndarray:
    """Bool `[..., rows]`: True where all k ids of `routes` `[..., rows, k]` are the missing-row value."""
    if routes.shape[-1] == 0:
        return np.zeros(routes.shape[:-1], dtype=bool)
    return (routes == missing_sentinel(routes.dtype)).all(axis=-1)


def slice_routes(view: np.ndarray, layers: slice, rows: slice = slice(None)) -> np.ndarray:
    """Copy `view[layers, rows]` out of a mapped file, touching no other byte.

    Args:
        view: `[L, N-1, k]`, usually a view of a memory-mapped shard.
        layers: route rows l (not decoder layers, see `stage_layers`) of this stage.
        rows: token positions.

    Returns:
        A contiguous, writable array of its own `[len(layers), len(rows), k]`.
    """
    part = view[layers, rows]
    prefetch(part)
    return np.array(part, order="C", copy=True)


def moe_layer_map(moe_layers: Sequence[int]) -> dict[int, int]:
    """`{decoder layer: l}`: which route row l belongs to each 0-based decoder layer.

    Raises:
        RouteError: `moe_layers` is not strictly ascending and non-negative.
    """
    layers = list(moe_layers)
    if any(layer < 0 for layer in layers) or any(b <= a for a, b in zip(layers, layers[1:], strict=False)):
        raise RouteError(
            "MoE layer ids are out of order",
            field="moe_layers",
            found=tuple(layers),
            expected="0-based decoder layers, strictly ascending",
        )
    return {layer: row for row, layer in enumerate(layers)}


def stage_layers(moe_layers: Sequence[int], first: int, last: int) -> slice:
    """Route rows of the MoE layers among decoder layers [first, last): one contiguous slice, possibly empty.

    Under interleaving a rank holds several model chunks: call it once a chunk.
    """
    rows = [row for layer, row in moe_layer_map(moe_layers).items() if first <= layer < last]
    return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)


def padding_rows(n: int, num_experts: int, topk: int, start: int = 0) -> np.ndarray:
    """Routes for `n` padding tokens: distinct ids in each row, all experts equally loaded.

    Slot s = (start + i)·k + j of row i gets expert (s·g) mod E with g coprime to E, a bijection on each run of E
    slots. So rows have no duplicates, loads differ by at most one, and since g ≈ E/k the ids of a row fall on different
    expert-parallel ranks.

    Args:
        start: padding rows made before, so that calls for several sequences continue one even pattern.

    Returns:
        `[n, k]` of `route_dtype(num_experts)`.

    Raises:
        RouteError: top-k exceeds the number of experts.
    """
    if not 0 < topk <= num_experts:
        raise RouteError("top-k does not fit", field="topk", found=topk, expected=f"1..{num_experts} (experts)")
    stride = num_experts // topk
    while math.gcd(stride, num_experts) != 1:
        stride += 1
    slots = np.arange(start * topk, (start + n) * topk, dtype=np.int64)
    return (slots * stride % num_experts).astype(route_dtype(num_experts)).reshape(n, topk)


def agreement(recorded: np.ndarray, native: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many recorded ids the trainer's own top-k would also choose, layer by layer, as sets.

    Args:
        recorded: `[L, R, k]` unsigned ids; missing rows count on neither side.
        native: `[L, R, k]` ids of any integer type.

    Returns:
        `(agreeing, total)`, int64 `[L]` each. Sums over ranks and micro-batches are valid; divide last.

    Raises:
        RouteError: shapes differ.
    """
    if recorded.shape != native.shape or recorded.ndim != 3:
        raise RouteError("routes to compare differ in shape", found=native.shape, expected=recorded.shape)
    present = ~missing_rows(recorded)
    total = present.sum(axis=1, dtype=np.int64) * recorded.shape[2]
    agreeing = np.zeros(len(recorded), dtype=np.int64)
    for layer, (ours, theirs) in enumerate(zip(recorded, native, strict=True)):
        chosen = (ours[:, :, None] == theirs[:, None, :]).any(axis=2).sum(axis=1)
        agreeing[layer] = chosen[present[layer]].sum()
    return agreeing, total


def required_rows(action_mask: np.ndarray) -> int:
    """Number of leading rows that replay needs: rows 0..q_{J-1}-1, where q_{J-1} is the last decision's position.

    The log-prob of that decision depends on every earlier token. 0 when nothing was sampled.
    """
    positions = np.flatnonzero(action_mask)
    return int(positions[-1]) if len(positions) else 0


def coverage(routes: np.ndarray, action_mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Recorded rows among the required ones.

    Args:
        routes: `[L, N-1, k]`.
        action_mask: bool `[N]`.

    Returns:
        `(covered, required)`: int64 `[L]` rows present in each layer, and the rows required in every layer.
    """
    required = required_rows(action_mask)
    covered = (~missing_rows(routes[:, :required])).sum(axis=1, dtype=np.int64)
    return covered, required


def expert_load(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens sent to each expert: int64 `[L, E]` counts of `routes` `[L, R, k]`, missing rows left out."""
    load = np.zeros((len(routes), num_experts), dtype=np.int64)
    for row, layer in zip(load, routes, strict=True):
        row += np.bincount(layer.ravel(), minlength=num_experts)[:num_experts]
    return load


def from_engine(
    routes: np.ndarray, *, num_layers: int, moe_layers: Sequence[int], num_experts: int, rows: int
) -> np.ndarray:
    """Bring routes as an inference engine returns them into the recorded layout.

    Engines report either every decoder layer (dense ones hold anything) or the MoE layers only; nothing else is
    accepted.

    Args:
        routes: integer `[R, layers, k]`, token-major; -1 (or the storage type's largest value) in all k ids: missing.
        num_layers: decoder layers of the model.
        moe_layers: 0-based decoder layers that are MoE.
        rows: N-1. Rows beyond the R given (a trailing observation that was never fed) become missing rows.

    Returns:
        `[L, rows, k]` of `route_dtype(num_experts)`.

    Raises:
        RouteError: another layer count, more rows than N-1, ids out of range, a partly missing row.
    """
    selected = _select_moe_layers(routes, num_layers, list(moe_layer_map(moe_layers)))
    if len(selected) > rows:
        raise RouteError("more route rows than tokens fed", field="routes", found=len(selected), expected=f"<= {rows}")
    dtype = route_dtype(num_experts)
    sentinel = missing_sentinel(dtype)
    absent = (selected == -1) | (selected == sentinel)
    bad = np.where(absent, ~absent.all(axis=-1, keepdims=True), (selected < 0) | (selected >= num_experts))
    if bad.any():
        row, layer, _ = np.argwhere(bad)[0]
        raise RouteError(
            "expert ids out of range or a partly missing row",
            row=int(row),
            field="routes",
            found=f"{selected[row, layer].tolist()} in MoE layer {layer}",
            expected=f"{selected.shape[2]} ids in 0..{num_experts - 1}, or all missing",
        )
    out = np.full((selected.shape[1], rows, selected.shape[2]), sentinel, dtype=dtype)
    out[:, : len(selected)] = np.where(absent, sentinel, selected).astype(dtype).transpose(1, 0, 2)
    return out


def _select_moe_layers(routes: np.ndarray, num_layers: int, moe_layers: list[int]) -> np.ndarray:
    if routes.ndim == 3 and routes.shape[1] == len(moe_layers):
        return routes
    if routes.ndim == 3 and routes.shape[1] == num_layers:
        return routes[:, moe_layers]
    raise RouteError(
        "routes have the wrong layer count",
        field="routes",
        found=f"shape {routes.shape}",
        expected=f"[tokens, {len(moe_layers)} MoE layers or {num_layers} decoder layers, top-k]",
    )
