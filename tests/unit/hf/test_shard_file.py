"""A safetensors file written tensor by tensor: read back by the format's own library, aligned, hashed without gaps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.shard_file import Piece, ShardFile, header_room, tensor_bytes
from megatron_rl.hf.writer import StreamingWriter
from tests.unit.hf.checkpoints import tensors_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    path.unlink(missing_ok=True)
    file = ShardFile(path, header_room({name: tensor.shape for name, tensor in tensors.items()}))
    for name, tensor in tensors.items():
        file.add(name, tensor, tensor_bytes(tensor))
    return file.close_hashed({name: xxhash.xxh3_64_hexdigest(tensor_bytes(tensor)) for name, tensor in tensors.items()})


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(tensor))


def check_pieces(path: Path, pieces: list[Piece]) -> None:
    content, start = path.read_bytes(), 0
    for size, digest in pieces:
        assert xxhash.xxh3_64_hexdigest(content[start : start + size]) == digest
        start += size
    assert start == len(content)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=6))
def test_any_shapes_and_dtypes_come_back_aligned(tmp_path_factory: pytest.TempPathFactory, kinds) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    tensors = {f't{i} é"': torch.randn(shape).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    check_pieces(path, write(path, tensors))
    back = load_file(path)
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in back.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors.items()
    }
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert bits(opened.get_slice(name)[...]) == bits(tensor)
    content = path.read_bytes()
    room = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + room])
    for name, tensor in tensors.items():
        assert (8 + room + entries[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_the_header_of_large_offsets_fits_its_room() -> None:
    shapes = {f"model.layers.{i}.weight": (151936, 7168) for i in range(50)}
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end += 4 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end]}
    assert len(json.dumps(entries, separators=(",", ":"))) <= header_room(shapes)


def test_a_dtype_that_the_reader_refuses_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unsupported dtype.*int64"):
        write(tmp_path / "file", {"t": torch.arange(3)})


@pytest.mark.parametrize("max_shard_bytes", [20_000, 2**30])
def test_the_pieces_of_a_checkpoint_are_its_files(checkpoint, tmp_path: Path, max_shard_bytes: int) -> None:
    source, target = checkpoint("plain"), tmp_path / "out"
    with StreamingWriter(target, read_hf_config(source), source, max_shard_bytes=max_shard_bytes) as writer:
        for name, tensor in tensors_of(source).items():
            writer.write(name, tensor)
    assert writer.pieces.keys() == {file.name for file in target.glob("*.safetensors")}
    for name, pieces in writer.pieces.items():
        check_pieces(target / name, pieces)
