from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import CheckpointError
from megatron_rl.hf import reader as reader_module
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.importer import load_shard
from megatron_rl.hf.reader import INDEX_FILE, SafetensorsReader
from tests.unit.hf.checkpoints import Layout, edit_tensors, references, tensors_of

ROUTER = "model.layers.1.mlp.gate.weight"


class _CountingFile:
    """safe_open, adding up the bytes of every slice handed out."""

    total = 0

    def __init__(self, *args, **kwargs) -> None:
        self._file = reader_module_safe_open(*args, **kwargs)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        outer = self._file.get_slice(name)

        class Slice:
            get_shape, get_dtype = staticmethod(outer.get_shape), staticmethod(outer.get_dtype)

            def __getitem__(self, index):
                tensor = outer[index]
                _CountingFile.total += tensor.numel() * tensor.element_size()
                return tensor

        return Slice()


reader_module_safe_open = reader_module.safe_open


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(tp=2, etp=2, ep=3)], ids=str)
def test_one_rank_reads_no_more_than_its_shard(checkpoint, monkeypatch, layout):
    path = checkpoint("dense_layers")
    monkeypatch.setattr(reader_module, "safe_open", _CountingFile)
    _CountingFile.total = 0
    reader, config = SafetensorsReader(path), read_hf_config(path)
    shard_bytes = 0
    for refs in references(config, layout):
        if refs[0].expert is not None and refs[0].expert >= config.num_experts // layout.ep:
            continue
        shard_bytes += load_shard(reader, config, refs[-1]).numel() * 4
    assert shard_bytes * 0.9 < _CountingFile.total < shard_bytes * 1.1
    assert _CountingFile.total < 0.7 * sum(value.numel() * 4 for value in tensors_of(path).values())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_a_row_range_touches_few_pages_of_the_file(tmp_path):
    rows, columns = 8192, 1024
    save_file({"x": torch.ones(rows, columns)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    reader.read("x", (slice(1024, 2048), slice(0, columns))).clone()
    file_kib, touched_kib = rows * columns * 4 / 1024, _resident_kib(str(tmp_path / "model.safetensors"))
    assert file_kib / 8 <= touched_kib < file_kib / 2


def _resident_kib(file: str) -> int:
    """Resident KiB over all mappings of a file."""
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.endswith(file)
        elif mine and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def _load_all(path: Path) -> None:
    reader, config = SafetensorsReader(path), read_hf_config(path)
    for refs in references(config, Layout()):
        load_shard(reader, config, refs[0])


def test_a_dropped_expert_is_named(copy):
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    edit_tensors(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match="missing") as caught:
        _load_all(copy)
    assert caught.value.field == name


def test_a_transposed_router_is_named(copy):
    edit_tensors(copy, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].T.contiguous()}))
    with pytest.raises(CheckpointError) as caught:
        _load_all(copy)
    assert (caught.value.field, caught.value.found, caught.value.expected) == (ROUTER, (32, 6), (6, 32))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_non_finite_entry_is_named(copy, value):
    edit_tensors(copy, lambda tensors: tensors[ROUTER].__setitem__((3, 17), value))
    with pytest.raises(CheckpointError, match="1 NaN or inf") as caught:
        _load_all(copy)
    assert caught.value.field == ROUTER and caught.value.file == copy / "model.safetensors"


@pytest.mark.parametrize("keep", [3, -1])
def test_a_truncated_file_is_named(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or not safetensors") as caught:
        _load_all(copy)
    assert caught.value.file == file


def test_quantised_weights_are_refused(copy):
    edit_tensors(copy, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        _load_all(copy)


def test_slices_beyond_the_tensor_are_refused_not_clipped(copy):
    with pytest.raises(CheckpointError, match="outside"):
        SafetensorsReader(copy).read(ROUTER, (slice(0, 7), slice(0, 32)))


def test_a_directory_without_weights_or_with_two_sets_is_refused(copy, tmp_path):
    with pytest.raises(CheckpointError, match="lacks a file"):
        SafetensorsReader(tmp_path)
    (copy / INDEX_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="two sets"):
        SafetensorsReader(copy)


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ({}, "weight_map"),
        ({"weight_map": {ROUTER: "../other.safetensors"}}, "file name"),
        ({"weight_map": {ROUTER: "absent.safetensors"}}, "truncated or not"),
        ({"weight_map": {"nobody": "part.safetensors"}}, "missing from its file"),
    ],
)
def test_an_index_that_lies_is_refused(copy, index, word):
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=word):
        reader = SafetensorsReader(copy)
        reader.read(reader.names()[0])
