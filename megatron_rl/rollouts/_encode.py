"""Trajectories to one Arrow table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.rollouts._format import SCHEMA, TOKEN_COLUMNS, encode_header
from megatron_rl.rollouts.routes import route_dtype
from megatron_rl.rollouts.schema import OUTCOMES, RolloutHeader, Trajectory

_MAX_VALUES = 2**31 - 1
"""Arrow lists have int32 offsets."""


def encode(header: RolloutHeader, trajectories: Sequence[Trajectory], file: object) -> pa.Table:
    """One record batch holding all trajectories, after checking what the columns cannot express.

    Args:
        file: the shard this is for, named in errors.

    Raises:
        RolloutError, RouteError: a field of another dtype, rank or length; an unknown outcome; unserialisable metadata.
    """
    for row, trajectory in enumerate(trajectories):
        where = {"file": file, "row": row}
        _check_arrays(trajectory, where)
        _check_routes(trajectory, where, header)
    columns = [_column(field, trajectories, file) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA.with_metadata(encode_header(header)))


def _check_arrays(trajectory: Trajectory, where: dict[str, Any]) -> None:
    length = len(trajectory.tokens)
    for name, dtype in TOKEN_COLUMNS.items():
        _check_array(trajectory, name, dtype, where, length)
    _check_array(trajectory, "turn_rewards", np.dtype(np.float32), where)
    for name, dtype in (("boundary_tokens", np.dtype(np.int32)), ("reward_vector", np.dtype(np.float32))):
        if getattr(trajectory, name) is not None:
            _check_array(trajectory, name, dtype, where)
    if trajectory.outcome not in OUTCOMES:
        raise RolloutError("unknown outcome", **where, field="outcome", found=trajectory.outcome, expected=OUTCOMES)


def _check_array(
    trajectory: Trajectory, name: str, dtype: np.dtype, where: dict[str, Any], length: int | None = None
) -> None:
    value = getattr(trajectory, name)
    if value.dtype != dtype or value.ndim != 1:
        found = f"{value.dtype}{list(value.shape)}"
        raise RolloutError("wrong array type", **where, field=name, found=found, expected=f"{dtype}[N]")
    if length is not None and len(value) != length:
        raise RolloutError("column length differs from tokens", **where, field=name, found=len(value), expected=length)


def _check_routes(trajectory: Trajectory, where: dict[str, Any], header: RolloutHeader) -> None:
    if trajectory.routes is None:
        return
    model = header.fingerprint
    shape = (len(model.moe_layers), max(len(trajectory.tokens) - 1, 0), model.topk)
    dtype = route_dtype(model.num_experts)
    if trajectory.routes.shape != shape or trajectory.routes.dtype != dtype:
        raise RouteError(
            "routes do not fit the model or the tokens",
            **where,
            field="routes",
            found=f"{trajectory.routes.dtype}{list(trajectory.routes.shape)}",
            expected=f"{dtype}{list(shape)} (MoE layers, tokens - 1, top-k)",
        )


def _column(field: pa.Field, trajectories: Sequence[Trajectory], file: object) -> pa.Array:
    if field.name == "metadata":
        return pa.array([_metadata(t, {"file": file, "row": row}) for row, t in enumerate(trajectories)], field.type)
    values = [getattr(trajectory, field.name) for trajectory in trajectories]
    if field.name == "routes":
        return _binary_column(values)
    if field.name == "outcome":
        indices = pa.array([OUTCOMES.index(value) for value in values], pa.int8())
        return pa.DictionaryArray.from_arrays(indices, pa.array(OUTCOMES, pa.string()))
    if pa.types.is_list(field.type):
        return _list_column(field, values, file)
    return pa.array(values, field.type)


def _metadata(trajectory: Trajectory, where: dict[str, Any]) -> str:
    try:
        return json.dumps(trajectory.metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            "metadata is not JSON", **where, field="metadata", found=error, expected="values JSON can express"
        ) from error


def _offsets(values: Sequence[np.ndarray | None], unit: str) -> np.ndarray:
    lengths = [0 if value is None else getattr(value, unit) for value in values]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _list_column(field: pa.Field, values: Sequence[np.ndarray | None], file: object) -> pa.ListArray:
    offsets = _offsets(values, "size")
    if offsets[-1] > _MAX_VALUES:
        raise RolloutError(
            "too many values for one shard",
            file=file,
            field=field.name,
            found=offsets[-1],
            expected=f"at most {_MAX_VALUES}",
        )
    numpy_type = field.type.value_type.to_pandas_dtype()
    flat = np.concatenate([np.empty(0, numpy_type), *(value for value in values if value is not None)])
    null = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(flat, field.type.value_type), type=field.type, mask=null
    )


def _binary_column(values: Sequence[np.ndarray | None]) -> pa.LargeBinaryArray:
    # One concatenation straight into the Arrow buffer: routes are most of a shard's bytes.
    offsets = _offsets(values, "nbytes")
    data = np.empty(offsets[-1], np.uint8)
    for value, begin, end in zip(values, offsets[:-1], offsets[1:], strict=True):
        if value is not None:
            data[begin:end] = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
    valid = np.packbits(np.array([value is not None for value in values], dtype=bool), bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), buffers)
