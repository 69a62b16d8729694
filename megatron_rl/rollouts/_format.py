"""The shard format: Arrow schema and the header kept in its metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts.routes import route_dtype
from megatron_rl.rollouts.schema import FORMAT_VERSION, ModelFingerprint, RolloutHeader, SamplingTruth

TOKEN_COLUMNS = {
    "tokens": np.dtype(np.int32),
    "action_mask": np.dtype(np.bool_),
    "turn_id": np.dtype(np.int16),
    "logprobs": np.dtype(np.float32),
    "version": np.dtype(np.int32),
}
"""Columns with one value a raw token, hence of one length in each row."""

SCHEMA = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("prompt_id", pa.string()),
        ("group_id", pa.string()),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in TOKEN_COLUMNS.items()),
        ("turn_rewards", pa.list_(pa.float32())),
        ("reward", pa.float32()),
        ("reward_vector", pa.list_(pa.float32())),
        ("outcome", pa.dictionary(pa.int8(), pa.string())),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("boundary_tokens", pa.list_(pa.int32())),
        ("routes", pa.large_binary()),
        ("metadata", pa.string()),
    ]
)
NULLABLE = frozenset({"reward_vector", "boundary_tokens", "routes"})
PREFIX = "megatron_rl."


def encode_header(header: RolloutHeader) -> dict[str, str]:
    """Arrow schema metadata of a shard: one readable key for each part, JSON where it has structure."""
    return {
        PREFIX + "format_version": str(header.format_version),
        PREFIX + "fingerprint": json.dumps(asdict(header.fingerprint)),
        PREFIX + "sampling": json.dumps(asdict(header.sampling)),
        PREFIX + "engine": header.engine,
        PREFIX + "route_dtype": route_dtype(header.fingerprint.num_experts).name,
    }


def decode_header(schema: pa.Schema, file: str) -> RolloutHeader:
    """Inverse of `encode_header`, after checking format version and column types.

    Raises:
        RolloutError: not a rollout shard, another format version, a missing or retyped column, unreadable metadata.
    """
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    version = metadata.get(PREFIX + "format_version")
    if version != str(FORMAT_VERSION):
        raise RolloutError(
            "shard has another format version",
            file=file,
            field="format_version",
            found=version,
            expected=FORMAT_VERSION,
            setting="write the rollout with this release",
        )
    _check_columns(schema, file)
    header = RolloutHeader(
        fingerprint=_record(ModelFingerprint, metadata, "fingerprint", file),
        sampling=_record(SamplingTruth, metadata, "sampling", file),
        engine=metadata.get(PREFIX + "engine", ""),
    )
    expected = route_dtype(header.fingerprint.num_experts).name
    found = metadata.get(PREFIX + "route_dtype")
    if found != expected:
        raise RolloutError("wrong route type", file=file, field="route_dtype", found=found, expected=expected)
    return header


def _check_columns(schema: pa.Schema, file: str) -> None:
    for column in SCHEMA:
        position = schema.get_field_index(column.name)
        found = schema.field(position).type if position >= 0 else "no such column"
        if found != column.type:
            raise RolloutError(
                "shard has the wrong schema", file=file, field=column.name, found=found, expected=column.type
            )


def _record(kind: type, metadata: dict[str, str], name: str, file: str) -> Any:
    text = metadata.get(PREFIX + name)
    expected = [field.name for field in fields(kind)]
    try:
        values = json.loads(text or "")
        if sorted(values) != sorted(expected):
            raise ValueError("fields differ")
    except (ValueError, TypeError) as error:
        raise RolloutError(
            "shard header is unreadable", file=file, field=name, found=text, expected=f"JSON with {expected}"
        ) from error
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
