"""Where the values of a conversion come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import HFModelConfig, read_hf_config
from megatron_rl.hf.importer import needs_initialisation, read_tensor, stored_as
from megatron_rl.hf.inventory import HFTensor, dropped_note, hf_tensors, is_stored, model_parameters, mtp_names
from megatron_rl.hf.json_files import read_json
from megatron_rl.hf.quantised import FP8Reader, open_checkpoint
from megatron_rl.hf.table import KEPT_DTYPE, ParamRule


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model, with the HF tensors it is."""

    canonical: str
    layer: int | None
    """Global, 0-based."""
    expert: int | None
    """None also where the family stores all experts of a layer in one tensor: then the parameter is all of them."""
    tensors: tuple[HFTensor, ...]
    """As written."""
    may_be_constant: bool
    keeps_dtype: bool = False
    """Written as the source gives it, whatever dtype is asked for."""


class Source(Protocol):
    """What a conversion reads."""

    config: HFModelConfig
    """Of what is to be written."""
    directory: Path
    """Whose config.json, generation and tokenizer files go along."""
    stored_dtype: torch.dtype | None
    """What the target is written in unless told otherwise; None: every tensor as it is stored."""

    def parameters(self) -> list[Parameter]:
        """All that is written, in an order that suits reading."""
        ...

    def notes(self) -> list[str]:
        """Lines for the user, on what is left out or copied as it is."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON that changes whenever the values may have; a killed conversion is continued only where it is equal."""
        ...

    def dtype(self, tensor: HFTensor) -> torch.dtype:
        """Dtype in which `read` gives a tensor."""
        ...

    def read(self, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of each tensor of a parameter, in order; results may be views of a file."""
        ...

    def release(self) -> None:
        """Let go of mapped files; they are mapped again when needed."""
        ...


def model_in_order(config: HFModelConfig) -> list[Parameter]:
    """Every stored parameter of a model once: what lies outside the layers, then layer by layer, expert by expert."""
    found = [
        _parameter(config, rule, layer, expert)
        for rule, layer, expert in model_parameters(config)
        # Where experts are stored as one tensor, the first stands for all.
        if is_stored(config, rule) and not (expert and _stacked_only(rule))
    ]
    return sorted(found, key=lambda p: (-1 if p.layer is None else p.layer, -1 if p.expert is None else p.expert))


def _parameter(config: HFModelConfig, rule: ParamRule, layer: int | None, expert: int | None) -> Parameter:
    tensors = hf_tensors(config, rule, layer, expert)
    if _stacked_only(rule):
        stacks = dict(tensor.written_as for tensor in tensors)
        tensors, expert = tuple(HFTensor(name, shape, None) for name, shape in stacks.items()), None
    keeps = rule.canonical in KEPT_DTYPE
    return Parameter(rule.canonical, layer, expert, tensors, rule.may_be_constant, keeps)


def _stacked_only(rule: ParamRule) -> bool:
    return all(source.stacked is not None and source.stacked.only for source in rule.sources)


class HFSource:
    """An HF checkpoint as it is, or the critic that starts from it.

    Args:
        path: checkpoint directory; fp8 blocks are dequantised.
        value_head: None: the checkpoint's own head. `zero`: a critic whose values start at 0. `random`: entries drawn
            with standard deviation hidden_size^-1/2 from `seed`. Otherwise the directory of a critic of the same hidden
            size whose trained head is taken.
        seed: of a random head.
        keep_mtp: copy multi-token-prediction layers as they are, instead of leaving them out.

    Raises:
        CheckpointError: the directory does not hold what its config.json says, or no critic can be made of it.
    """

    def __init__(
        self, path: str | Path, *, value_head: str | Path | None = None, seed: int = 0, keep_mtp: bool = False
    ) -> None:
        self.directory = Path(path)
        self._stored = read_hf_config(path, mtp="keep" if keep_mtp else "drop")
        self._reader = open_checkpoint(path)
        audit_checkpoint(self._reader, self._stored, values=False).raise_for_problems(self.directory)
        self._seed, self._head = seed, value_head
        self._head_from: HFSource | None = None
        self.config = self._stored if value_head is None else self._stored.as_critic()
        quantised = isinstance(self._reader, FP8Reader)
        self.stored_dtype = own_dtype(self.directory, "bfloat16") if quantised else None
        if value_head not in (None, "zero", "random"):
            self._head_from = HFSource(value_head)
            self._check_head(self._head_from)

    def parameters(self) -> list[Parameter]:
        """See `Source.parameters`."""
        kept = mtp_names(self.config, self._reader.names()) if self.config.keep_mtp else []
        extra = [Parameter(n, None, None, (HFTensor(n, self._reader.shape(n), None),), True) for n in kept]
        return [*model_in_order(self.config), *extra]

    def notes(self) -> list[str]:
        """What is left out or copied without being part of the model."""
        return dropped_note(self.config, self._reader.names())

    def identity(self) -> dict[str, Any]:
        """Path, size and time of every file with weights or settings, and the head."""
        files = sorted(f for pattern in ("*.safetensors", "*.json") for f in self.directory.glob(pattern))
        stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        head = self._head_from.identity() if self._head_from else [self._head, self._seed]
        return {"kind": "hf", "path": str(self.directory.resolve()), "files": stats, "value_head": head}

    def dtype(self, tensor: HFTensor) -> torch.dtype:
        """As stored; a new head takes the dtype of the embedding."""
        if tensor.name in self._reader or stored_as(self._reader, tensor)[0] in self._reader:
            return self._reader.dtype(stored_as(self._reader, tensor)[0])
        if self._head_from:
            return self._head_from.dtype(tensor)
        return self.dtype(model_in_order(self._stored)[0].tensors[0])

    def read(self, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
        """See `Source.read`."""
        for tensor in parameter.tensors:
            if not self._is_new(parameter):
                whole = [slice(0, size) for size in tensor.shape]
                yield tensor.name, read_tensor(self._reader, tensor, whole, check_finite=False)
            elif self._head_from:
                yield from self._head_from.read(parameter)
            else:
                yield tensor.name, self._fresh(tensor)

    def release(self) -> None:
        """See `Source.release`."""
        self._reader = open_checkpoint(self.directory)

    def _is_new(self, parameter: Parameter) -> bool:
        return self._head is not None and (
            needs_initialisation(self._stored, parameter.canonical)
            or (self._stored.head == "value" and parameter.canonical == "value_head.weight")
        )

    def _fresh(self, tensor: HFTensor) -> Tensor:
        if self._head == "zero":
            return torch.zeros(tensor.shape)
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randn(tensor.shape, generator=generator) / tensor.shape[1] ** 0.5

    def _check_head(self, source: HFSource) -> None:
        found = source.config
        if found.head != "value" or found.hidden_size != self.config.hidden_size:
            raise CheckpointError(
                "no value head for this model",
                file=source.directory,
                found=f"{found.head} head, hidden size {found.hidden_size}",
                expected=f"value head, hidden size {self.config.hidden_size}",
                setting="--value-head",
            )


def own_dtype(directory: Path, default: str) -> torch.dtype:
    """The dtype a checkpoint's config.json names, else the default."""
    settings = read_json(directory / "config.json")
    name = settings.get("dtype") or settings.get("torch_dtype") or default
    return parse_dtype(name, directory / "config.json")


def parse_dtype(name: str, file: Path | None = None) -> torch.dtype:
    """float32, bfloat16 or float16 by name.

    Raises:
        CheckpointError: another name.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise CheckpointError("unknown dtype", file=file, field="dtype", found=name, expected=f"one of {list(known)}")
    return known[name]
