"""Arrow record batches to `RolloutBatch`: views of the mapped file wherever the layout allows it.

What cannot be expressed as flat columns (columns of unequal length, nulls, routes of an impossible size) is found here,
row by row; everything else is left to `validate`.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.rollouts._format import NULLABLE, SCHEMA, TOKEN_COLUMNS
from megatron_rl.rollouts.routes import route_dtype
from megatron_rl.rollouts.schema import RolloutBatch, RolloutHeader


def decode(
    records: pa.RecordBatch, header: RolloutHeader, file: str, first_row: int, refused: list[RolloutError] | None
) -> RolloutBatch:
    """Flat columns of one record batch.

    Args:
        file, first_row: where the batch lies, for `sources` and errors.
        refused: None raises the first structural fault; a list receives one error a damaged row, and those rows are
            left out.
    """
    faults = structural_faults(records, header, file, first_row)
    if faults and refused is None:
        raise next(iter(faults.values()))
    if refused is not None:
        refused.extend(faults.values())
    rows = np.array([row for row in range(records.num_rows) if row not in faults], dtype=np.int64)
    routes = records.column("routes")
    if faults:  # routes are left out of the copy: they are most of the bytes, and views need none
        others = [name for name in records.schema.names if name != "routes"]
        records = records.select(others).take(pa.array(rows))
    return _assemble(records, routes, rows, header, file, first_row)


def _assemble(
    records: pa.RecordBatch, routes: pa.Array, rows: np.ndarray, header: RolloutHeader, file: str, first_row: int
) -> RolloutBatch:
    column = records.column
    offsets, tokens = flat_list(column("tokens"))
    turn_offsets, turn_rewards = flat_list(column("turn_rewards"))
    boundary_offsets, boundary_tokens = flat_list(column("boundary_tokens"))
    return RolloutBatch(
        header=header,
        trajectory_ids=tuple(column("trajectory_id").to_pylist()),
        prompt_ids=tuple(column("prompt_id").to_pylist()),
        group_ids=tuple(column("group_id").to_pylist()),
        offsets=offsets,
        tokens=tokens,
        **{name: flat_list(column(name))[1] for name in TOKEN_COLUMNS if name != "tokens"},
        turn_offsets=turn_offsets,
        turn_rewards=turn_rewards,
        reward=_plain(column("reward")),
        outcome=tuple(column("outcome").to_pylist()),
        terminated=_plain(column("terminated")),
        truncated=_plain(column("truncated")),
        boundary_offsets=boundary_offsets,
        boundary_tokens=boundary_tokens,
        boundary_known=_plain(column("boundary_tokens").is_valid()),
        routes=_route_views(routes, rows, np.diff(offsets), header),
        sources=tuple((file, first_row + int(row)) for row in rows),
        metadata=tuple(json.loads(text) for text in column("metadata").to_pylist()),
        reward_vectors=_optional_lists(column("reward_vector")),
    )


def _plain(column: pa.Array) -> np.ndarray:
    values = column.to_numpy(zero_copy_only=False)
    values.flags.writeable = False
    return values


def list_lengths(column: pa.ListArray) -> np.ndarray:
    """int64 `[rows]`: values in each list, 0 for a null."""
    return pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def flat_list(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """`(offsets [rows + 1], values)` of a list column; a view unless it is boolean (Arrow packs those into bits)."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(list_lengths(column))])
    return offsets, _plain(column.flatten())


def _optional_lists(column: pa.ListArray) -> tuple[np.ndarray | None, ...]:
    offsets, values = flat_list(column)
    known = column.is_valid().to_pylist()
    return tuple(
        values[begin:end] if here else None for here, begin, end in zip(known, offsets[:-1], offsets[1:], strict=True)
    )


def _binary_offsets(column: pa.LargeBinaryArray) -> np.ndarray:
    buffer = column.buffers()[1]
    if len(column) == 0 or buffer is None:
        return np.zeros(len(column) + 1, np.int64)
    return np.frombuffer(buffer, np.int64)[column.offset : column.offset + len(column) + 1]


def _route_views(
    column: pa.LargeBinaryArray, rows: np.ndarray, lengths: np.ndarray, header: RolloutHeader
) -> tuple[np.ndarray | None, ...]:
    model, dtype = header.fingerprint, route_dtype(header.fingerprint.num_experts)
    offsets, valid, buffer = _binary_offsets(column), _plain(column.is_valid()), column.buffers()[2]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.empty(0, np.uint8)
    views: list[np.ndarray | None] = []
    for row, length in zip(rows, lengths, strict=True):
        shape = (len(model.moe_layers), int(length) - 1, model.topk)
        views.append(data[offsets[row] : offsets[row + 1]].view(dtype).reshape(shape) if valid[row] else None)
    return tuple(views)


def structural_faults(
    records: pa.RecordBatch, header: RolloutHeader, file: str, first_row: int
) -> dict[int, RolloutError]:
    """The first fault of each row that keeps it from being laid out as flat columns, by row of `records`."""
    faults: dict[int, RolloutError] = {}

    def fault(row: int, what: str, field: str, found: object, expected: object, kind=RolloutError) -> None:
        error = kind(
            what,
            file=file,
            row=first_row + row,
            field=field,
            found=found,
            expected=expected,
            setting="rollout.on_bad_record",
        )
        faults.setdefault(int(row), error)

    for row, name in _null_rows(records):
        fault(row, "null where a value is required", name, "null", SCHEMA.field(name).type)
    lengths = list_lengths(records.column("tokens"))
    for row in np.flatnonzero(lengths == 0).tolist():
        fault(row, "trajectory has no tokens", "tokens", 0, "at least one token")
    for name in TOKEN_COLUMNS:
        found = list_lengths(records.column(name))
        for row in np.flatnonzero(found != lengths).tolist():
            fault(row, "column length differs from tokens", name, int(found[row]), int(lengths[row]))
    for row, text in enumerate(records.column("metadata").to_pylist()):
        if text is not None and not _is_json_object(text):
            fault(row, "metadata is not a JSON object", "metadata", text[:80], "a JSON object")
    for row, what, found, expected in _route_size_faults(records.column("routes"), lengths, header):
        fault(row, what, "routes", found, expected, RouteError)
    return dict(sorted(faults.items()))


def _null_rows(records: pa.RecordBatch) -> list[tuple[int, str]]:
    found = []
    for field in SCHEMA:
        column = records.column(field.name)
        if field.name not in NULLABLE and column.null_count:
            found += [(int(row), field.name) for row in np.flatnonzero(_plain(column.is_null()))]
        if pa.types.is_list(field.type) and column.values.null_count:
            parents = pc.list_parent_indices(column).filter(column.flatten().is_null())
            found += [(int(row), field.name) for row in parents.unique().to_pylist()]
    return found


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _route_size_faults(column: pa.LargeBinaryArray, lengths: np.ndarray, header: RolloutHeader):
    """Yield `(row, what, found, expected)` where the bytes are not L·(N-1)·k ids."""
    model = header.fingerprint
    id_bytes = route_dtype(model.num_experts).itemsize
    layers, sizes = len(model.moe_layers), np.diff(_binary_offsets(column))
    fed = np.maximum(lengths - 1, 0)
    for row in np.flatnonzero(_plain(column.is_valid()) & (sizes != layers * fed * model.topk * id_bytes)):
        a_layer, a_row = int(fed[row]) * model.topk * id_bytes, layers * model.topk * id_bytes
        size = int(sizes[row])
        if a_layer and size % a_layer == 0:
            yield row, "routes have the wrong layer count", f"{size // a_layer} layers", f"{layers} MoE layers"
        elif a_row and size % a_row == 0:
            yield row, "routes have the wrong row count", f"{size // a_row} rows", f"{fed[row]} rows (tokens - 1)"
        else:
            yield row, "routes have an impossible size", f"{size} bytes", f"{layers * a_layer} bytes"
