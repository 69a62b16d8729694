"""fp8 checkpoints: values against a loop over entries, slices that cut blocks, refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.importer import load_shard
from megatron_rl.hf.quantised import FP8Blocks, FP8Reader, open_checkpoint
from megatron_rl.hf.reader import SafetensorsReader
from tests.unit.hf.checkpoints import Layout, edit_config, edit_tensors, references, slow_shard

BLOCK = (8, 16)
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantised(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 values, scales): the largest entry of each block becomes 448, the largest fp8 number."""
    rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def slowly(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Entry by entry, in float32."""
    out = torch.empty(values.shape)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j].float() * scales[i // block[0], j // block[1]]
    return out


def quantise_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Turn the projections of a checkpoint into fp8; returns what its tensors then are, in float32."""
    truth: dict[str, torch.Tensor] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            truth[name] = tensor.clone()
            if name.endswith("_proj.weight"):
                values, scales = quantised(tensor)
                tensors[name], tensors[name + "_scale_inv"] = values, scales
                truth[name] = slowly(values, scales)

    edit_tensors(path, edit)
    edit_config(path, quantization_config=SCHEME, dtype="bfloat16")
    return truth


@pytest.fixture
def fp8(checkpoint, tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = shutil.copytree(checkpoint("dense_layers"), tmp_path / "fp8")
    return path, quantise_checkpoint(path)


def test_every_tensor_is_what_the_loop_gives_and_scales_do_not_show(fp8) -> None:
    path, truth = fp8
    reader = open_checkpoint(path)
    assert set(reader.names()) == truth.keys() == reader.headers().keys()
    for name, expected in truth.items():
        found = reader.read(name)
        assert found.dtype == reader.dtype(name) == torch.float32 and torch.equal(found, expected), name
    assert audit_checkpoint(reader, read_hf_config(path)).problems == ()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, etp=2, ep=3)], ids=str)
def test_shards_of_tensor_ranks_cut_blocks_and_are_exact(fp8, layout) -> None:
    path, truth = fp8
    reader, config = open_checkpoint(path), read_hf_config(path)
    for refs in references(config, layout):
        for ref in refs:
            assert torch.equal(load_shard(reader, config, ref), slow_shard(truth, config, ref)), ref


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slice_equals_the_slice_of_the_whole(tmp_path, data) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    block = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17))
    values, scales = quantised(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), block)
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    part = []
    for size in (rows, columns):
        start = data.draw(st.integers(0, size))
        part.append(slice(start, data.draw(st.integers(start, size))))
    found = FP8Reader(tmp_path, FP8Blocks(*block)).read("w", part)
    assert torch.equal(found, slowly(values, scales, block)[tuple(part)])


def test_stacked_experts_have_a_scale_for_each(tmp_path) -> None:
    pairs = [quantised(torch.randn(20, 40)) for _ in range(3)]
    values, scales = (torch.stack([pair[i] for pair in pairs]) for i in (0, 1))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    found = FP8Reader(tmp_path, FP8Blocks(*BLOCK)).read("w", (slice(1, 3), slice(5, 19)))
    assert torch.equal(found, torch.stack([slowly(*pair)[5:19] for pair in pairs[1:]]))


def test_a_slice_reads_its_own_bytes_only(fp8, monkeypatch) -> None:
    path, _ = fp8
    name, read = "model.layers.0.self_attn.q_proj.weight", []
    original = SafetensorsReader._slice

    class Counting:
        def __init__(self, inner) -> None:
            self.get_shape, self.get_dtype, self._inner = inner.get_shape, inner.get_dtype, inner

        def __getitem__(self, index):
            tensor = self._inner[index]
            read.append(tensor.numel())
            return tensor

    monkeypatch.setattr(SafetensorsReader, "_slice", lambda self, name: Counting(original(self, name)))
    open_checkpoint(path).read(name, (slice(9, 15), slice(0, 32)))
    assert sorted(read) == [2, 6 * 32]


@pytest.mark.parametrize(
    ("edit", "word", "field"),
    [
        (lambda t, n: t.pop(n + "_scale_inv"), "missing", "_scale_inv"),
        (lambda t, n: t.update({n + "_scale_inv": t[n + "_scale_inv"][1:]}), "do not fit their blocks", "_scale_inv"),
        (lambda t, n: t[n + "_scale_inv"].__setitem__((0, 0), torch.inf), "non-finite", "_scale_inv"),
        (lambda t, n: t[n].view(torch.uint8).__setitem__((3, 4), 0x7F), "1 NaN or inf", "weight"),
    ],
)
def test_broken_scales_and_values_are_named(fp8, edit, word, field) -> None:
    path, _ = fp8
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(path, lambda tensors: edit(tensors, name))
    with pytest.raises(CheckpointError, match=word) as caught:
        open_checkpoint(path).read(name)
    assert caught.value.field.startswith(name.removesuffix("weight")) and caught.value.field.endswith(field)


def test_scales_without_a_weight_are_reported(fp8) -> None:
    path, _ = fp8
    edit_tensors(path, lambda tensors: tensors.update({"model.norm.weight_scale": torch.ones(1)}))
    edit_tensors(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    report = audit_checkpoint(open_checkpoint(path), read_hf_config(path))
    assert report.of("missing") == ["model.layers.1.self_attn.k_proj.weight"]
    assert report.of("unexpected") == ["model.layers.1.self_attn.k_proj.weight_scale_inv", "model.norm.weight_scale"]


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static"},
        SCHEME | {"fmt": "e5m2"},
        SCHEME | {"weight_block_size": [128]},
    ],
)
def test_other_quantisations_are_refused_by_name(checkpoint, tmp_path, scheme) -> None:
    path = shutil.copytree(checkpoint("plain"), tmp_path / "other")
    edit_config(path, quantization_config=scheme)
    for read in (read_hf_config, open_checkpoint):
        with pytest.raises(CheckpointError, match="unsupported quantisation") as caught:
            read(path)
        assert caught.value.field == "quantization_config" and scheme["quant_method"] in str(caught.value)


def test_the_dequantised_export_says_nothing_of_fp8_and_is_rounded_once(fp8, tmp_path) -> None:
    from megatron_rl.hf.conversion.conversion import convert
    from megatron_rl.hf.conversion.output_files import make_plan
    from megatron_rl.hf.conversion.sources import HFSource

    path, truth = fp8
    source, target = HFSource(path), tmp_path / "out"
    convert(source, target, make_plan(source))
    written = load_file(target / "model.safetensors")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name].bfloat16()) for name in truth)
    values = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in values and values["dtype"] == "bfloat16"
