"""HF checkpoint → the shard of one rank, without collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.inventory import HFTensor, hf_tensors, is_stored, rule_for
from megatron_rl.hf.reader import SafetensorsReader
from megatron_rl.hf.table import ParamRule
from megatron_rl.hf.tensor_parallel import exact_share, merge, rank_slices


@dataclass(frozen=True)
class ParamRef:
    """One parameter of one rank of a live model."""

    canonical: str
    """From `names.parse_parameter_name`."""
    layer: int | None
    """Global decoder layer, 0-based; None outside the layers."""
    expert: int | None
    """Global expert: expert-parallel rank * experts per rank + local expert; None for other parameters."""
    tp_rank: int
    """Rank within the tensor-parallel group; for experts, the expert-tensor-parallel group."""
    tp_size: int
    shape: tuple[int, ...]
    """Shape of the live shard; under `vocab` its rows include the padding."""


def needs_initialisation(config: HFModelConfig, canonical: str) -> bool:
    """Whether a checkpoint of `config` rightly has no values for a parameter, so that its fresh values stay.

    True only for the value head of a critic that starts from a policy: its backbone is imported, its head is new.
    """
    return canonical == "value_head.weight" and config.head == "lm"


def load_shard(reader: SafetensorsReader, config: HFModelConfig, param: ParamRef) -> Tensor:
    """The values of one live parameter, in the checkpoint's dtype, on the CPU, in memory of their own.

    Reads only this rank's slices. QKV rows are ordered per query group [q heads, k, v], GLU rows [gate_r; up_r],
    vocabulary rows beyond the real ones are zero, and a tied output layer takes the embedding.

    Args:
        config: of the checkpoint (`read_hf_config` of the same directory), not of the model being filled.

    Raises:
        CheckpointError: the family has no such parameter, a tensor is missing, misshapen or non-finite, or the shard's
            shape does not follow from the parallel layout.
    """
    rule = rule_for(config, param.canonical)
    if rule.tied_to and not is_stored(config, rule):
        rule = rule_for(config, rule.tied_to)
    if rule.split == "vocab":
        _check_padding(config, param)
    try:
        groups = exact_share(config.num_kv_heads, param.tp_size) if rule.split == "qkv" else 1
        parts = [
            _rank_part(reader, rule, tensor, param) for tensor in hf_tensors(config, rule, param.layer, param.expert)
        ]
    except CheckpointError as error:
        raise error if error.field else _with_field(error, param.canonical) from None
    shard = merge(parts, groups)
    if rule.split == "vocab":
        shard = _pad_rows(shard, param.shape[0])
    if tuple(shard.shape) != tuple(param.shape):
        raise CheckpointError(
            "a shard does not fit the live parameter",
            file=reader.path,
            field=_place(param),
            found=tuple(param.shape),
            expected=f"{tuple(shard.shape)} for tensor-parallel size {param.tp_size}",
            setting="parallel.tensor, or the model's sizes",
        )
    return shard


def read_tensor(
    reader: SafetensorsReader, tensor: HFTensor, slices: Sequence[slice], *, check_finite: bool = True
) -> Tensor:
    """Slices of one HF tensor, wherever the checkpoint keeps it: under its own name or inside a stack of experts.

    Raises:
        CheckpointError: it is in neither place, or its stored shape is not the model's.
    """
    name, expected = stored_as(reader, tensor)
    found = reader.shape(name)
    if found != expected:
        raise CheckpointError(
            "a tensor has another shape than the model",
            file=reader.file(name),
            field=name,
            found=found,
            expected=expected,
        )
    if name == tensor.name or tensor.stacked is None:
        return reader.read(name, slices, check_finite=check_finite)
    return tensor.stacked.take(reader.read(name, tensor.stacked.where(slices), check_finite=check_finite))


def stored_as(reader: SafetensorsReader, tensor: HFTensor) -> tuple[str, tuple[int, ...]]:
    """Name and expected shape under which the checkpoint holds a tensor: its own, or those of a stack of experts."""
    stacked = tensor.stacked
    if stacked is not None and tensor.name not in reader and stacked.name in reader:
        return stacked.name, stacked.shape
    return tensor.written_as


def _rank_part(reader: SafetensorsReader, rule: ParamRule, tensor: HFTensor, param: ParamRef) -> Tensor:
    slices = rank_slices(rule.split, tensor.shape, param.tp_rank, param.tp_size, vocab_rows=param.shape[0])
    return read_tensor(reader, tensor, slices)


def _check_padding(config: HFModelConfig, param: ParamRef) -> None:
    if param.shape[0] * param.tp_size < config.vocab_size:
        raise CheckpointError(
            "the model's padded vocabulary is too small",
            field=param.canonical,
            found=param.shape[0] * param.tp_size,
            expected=f"at least {config.vocab_size} rows over all ranks",
            setting="the model's padded vocabulary size",
        )


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    padding = tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding])


def _place(param: ParamRef) -> str:
    layer = "" if param.layer is None else f" of layer {param.layer}"
    expert = "" if param.expert is None else f", expert {param.expert}"
    return f"{param.canonical}{layer}{expert}"


def _with_field(error: CheckpointError, field: str) -> CheckpointError:
    return CheckpointError(error.what, field=field, found=error.found, expected=error.expected, setting=error.setting)
