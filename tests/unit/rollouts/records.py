"""Small sound records for the rollout tests, and a way to damage a shard as another writer might."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_rl.rollouts import ModelFingerprint, RolloutHeader, SamplingTruth, Trajectory, write_shard
from megatron_rl.rollouts._shard_files import commit_shard

MODEL = ModelFingerprint("toy_moe", vocab_size=32, num_experts=8, topk=2, moe_layers=(1, 2, 3), tokenizer_hash="abc")
HEADER = RolloutHeader(MODEL, SamplingTruth(), engine="toy/1")


def routes_for(length: int, model: ModelFingerprint = MODEL, seed: int = 0) -> np.ndarray:
    """Random routes `[L, length - 1, k]` with distinct ids in each row."""
    generator = np.random.default_rng(seed)
    shape = (len(model.moe_layers), max(length - 1, 0), model.num_experts)
    dtype = np.uint8 if model.num_experts <= 255 else np.uint16
    return np.ascontiguousarray(generator.random(shape).argsort(axis=-1)[..., : model.topk].astype(dtype))


def sound(number: int = 0, **changes: Any) -> Trajectory:
    """Prompt of 2, a turn of 2, an observation, a turn of 1 and a trailing observation: 7 tokens, 3 decisions."""
    turn_id = np.array([-1, -1, 0, 0, -1, 1, -1], dtype=np.int16)
    mask = turn_id >= 0
    values: dict[str, Any] = {
        "trajectory_id": f"trajectory-{number}",
        "prompt_id": f"prompt-{number // 2}",
        "group_id": f"group-{number // 2}",
        "tokens": (np.arange(7) + number).astype(np.int32) % 32,
        "action_mask": mask,
        "turn_id": turn_id,
        "logprobs": np.where(mask, -0.5 - number, 0).astype(np.float32),
        "version": np.where(mask, 3, 0).astype(np.int32),
        "turn_rewards": np.array([0.25, -1.0], dtype=np.float32),
        "reward": 1.5,
        "outcome": "completed",
        "terminated": True,
        "truncated": False,
        "routes": routes_for(7, seed=number),
    }
    return Trajectory(**{**values, **changes})


def without_decisions(number: int = 0) -> Trajectory:
    """A trajectory in which nothing was sampled."""
    return sound(
        number,
        action_mask=np.zeros(7, bool),
        turn_id=np.full(7, -1, np.int16),
        turn_rewards=np.empty(0, np.float32),
    )


def changed(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """A copy with one element replaced."""
    copy = array.copy()
    copy[index] = value
    return copy


def write_tampered(directory: Path, column: str, values: dict[int, Any], count: int = 3) -> Path:
    """Commit a shard of `count` sound rows, some values of one column replaced in a way `write_shard` would refuse."""
    write_shard(directory, HEADER, [sound(number) for number in range(count)], name="tampered")
    path = directory / "tampered.arrow"
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    cells = table.column(column).to_pylist()
    for row, value in values.items():
        cells[row] = value
    kind = table.schema.field(column).type
    position = table.schema.get_field_index(column)
    table = table.set_column(position, table.schema.field(column), pa.array(cells, kind))
    commit_shard(directory, "tampered", table.combine_chunks(), tokens=7 * count, replace=True)
    return path


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """Equal bit for bit, dtypes and None included."""
    for name in Trajectory.__dataclass_fields__:
        one, other = getattr(left, name), getattr(right, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, name
            assert one.shape == other.shape, name
            assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes(), name
        elif isinstance(one, float):
            assert np.float64(one).tobytes() == np.float64(other).tobytes(), name
        else:
            assert one == other and type(one) is type(other), name
