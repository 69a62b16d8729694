"""Which parameters a model has, and which HF tensors each one is: the table applied to a configuration.

Multi-token-prediction layers are decoder layers beyond the model's own. Training neither builds nor changes them: an
import drops them with a note in the audit; an export leaves them out and sets their number to 0, or, where the
configuration keeps them (`read_hf_config(..., mtp="keep")`), copies them from the source checkpoint as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.families import TABLES
from megatron_rl.hf.table import ParamRule, Source, Stacked

MTP_SETTING = "num_nextn_predict_layers"
"""How many multi-token-prediction layers a checkpoint holds, in config.json."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class StackedTensor:
    """The part of a stacked tensor that holds one expert's matrix (or bias)."""

    name: str
    shape: tuple[int, ...]
    """As stored: [E, rows of all parts, columns], [E, columns, rows of all parts] where transposed, or [E, rows]."""
    expert: int
    rows: int
    """Of this part."""
    layout: Stacked

    def where(self, slices: Sequence[slice]) -> tuple[slice, ...]:
        """Slices of the stored tensor that hold slices [rows, columns…] of this part, and no more than they must."""
        part, parts = self.layout.part, self.layout.parts
        rows, *rest = slices
        if self.layout.interleaved:
            block = slice(rows.start * parts, rows.stop * parts)
        else:
            block = slice(rows.start + part * self.rows, rows.stop + part * self.rows)
        inner = (*rest, block) if self.layout.transposed else (block, *rest)
        return (slice(self.expert, self.expert + 1), *inner)

    def take(self, stored: Tensor) -> Tensor:
        """This part [rows, columns…] of what was read at `where`."""
        block = stored[0].movedim(-1, 0) if self.layout.transposed else stored[0]
        return block[self.layout.part :: self.layout.parts] if self.layout.interleaved else block

    def put(self, stored: Tensor, part: Tensor) -> None:
        """Write this part into the whole stored tensor."""
        self.take(stored[self.where([slice(0, size) for size in part.shape])]).copy_(part)


@dataclass(frozen=True)
class HFTensor:
    """One HF tensor by its per-expert name, with the place of the same values in a stacked checkpoint."""

    name: str
    shape: tuple[int, ...]
    stacked: StackedTensor | None

    @property
    def written_as(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the tensor that exports hold these values in."""
        if self.stacked is not None and self.stacked.layout.only:
            return self.stacked.name, self.stacked.shape
        return self.name, self.shape


def rule_for(config: HFModelConfig, canonical: str) -> ParamRule:
    """The family's rule for a parameter.

    Raises:
        CheckpointError: this family, with this head, has no such parameter.
    """
    for rule in TABLES[config.model_type]:
        if rule.canonical == canonical and _exists(config, rule):
            return rule
    raise CheckpointError(
        "a model parameter has no HF name",
        field=canonical,
        found=f"{config.model_type} with {config.head} head",
        expected="a parameter of this family's table",
    )


def hf_tensors(
    config: HFModelConfig, rule: ParamRule, layer: int | None = None, expert: int | None = None
) -> tuple[HFTensor, ...]:
    """The HF tensors of one parameter, in the rule's order. Layer and expert are global and 0-based.

    Raises:
        CheckpointError: layer or expert does not suit the rule (out of range, absent, or a dense layer for an expert).
    """
    if (layer, expert) not in _places(config, rule):
        raise CheckpointError(
            "a parameter is placed where the model has none",
            field=rule.canonical,
            found=f"layer {layer}, expert {expert}",
            expected=f"a place of scope {rule.scope!r}",
        )
    return tuple(_resolve(config, source, layer, expert) for source in rule.sources)


def model_parameters(config: HFModelConfig) -> Iterator[tuple[ParamRule, int | None, int | None]]:
    """Every parameter of the whole model once, as (rule, global layer or None, global expert or None).

    A tied output layer is included: the model has it though HF stores nothing for it.
    """
    for rule in TABLES[config.model_type]:
        if _exists(config, rule):
            for layer, expert in _places(config, rule):
                yield rule, layer, expert


def is_stored(config: HFModelConfig, rule: ParamRule) -> bool:
    """Whether HF stores this parameter: all but an output layer that is tied to the embedding."""
    return not (config.tied_embeddings and rule.tied_to)


def expected_names(config: HFModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a complete checkpoint, under the names exports write (`HFTensor.written_as`)."""
    return {
        name: shape
        for rule, layer, expert in model_parameters(config)
        if is_stored(config, rule)
        for name, shape in (tensor.written_as for tensor in hf_tensors(config, rule, layer, expert))
    }


def mtp_names(config: HFModelConfig, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensor names that belong to its multi-token-prediction layers, sorted."""
    layers = range(config.num_layers, config.num_layers + config.mtp_layers)
    return sorted(name for name in names if (match := _LAYER.match(name)) and int(match[1]) in layers)


def dropped_note(config: HFModelConfig, names: Iterable[str]) -> list[str]:
    """One line on the multi-token-prediction layers that are not imported, or none."""
    found = mtp_names(config, names)
    layers = f"{config.mtp_layers} multi-token-prediction layer(s) from model.layers.{config.num_layers} on"
    fate = "copied to exports as they are" if config.keep_mtp else "dropped: exports leave them out"
    return [f"{len(found)} tensors of {layers} are not trained, and {fate}"] if found else []


def _exists(config: HFModelConfig, rule: ParamRule) -> bool:
    return rule.head in (None, config.head) and (rule.when is None or bool(getattr(config, rule.when)))


class _Product:
    """layers x experts as a collection: membership without building the pairs (a large model has 10^5 of them)."""

    def __init__(self, layers: tuple[int | None, ...], experts: range | tuple[None]) -> None:
        self.layers, self.experts = layers, experts

    def __contains__(self, place: tuple[int | None, int | None]) -> bool:
        return place[0] in self.layers and place[1] in self.experts

    def __iter__(self) -> Iterator[tuple[int | None, int | None]]:
        return ((layer, expert) for layer in self.layers for expert in self.experts)


def _places(config: HFModelConfig, rule: ParamRule) -> _Product:
    layers: dict[str, tuple[int | None, ...]] = {
        "model": (None,),
        "layer": tuple(range(config.num_layers)),
        "dense": tuple(i for i in range(config.num_layers) if i not in config.moe_layers),
        "moe": config.moe_layers,
        "expert": config.moe_layers,
    }
    return _Product(layers[rule.scope], range(config.num_experts) if rule.scope == "expert" else (None,))


def _resolve(config: HFModelConfig, source: Source, layer: int | None, expert: int | None) -> HFTensor:
    shape = tuple(config.size(size) for size in source.shape)
    stacked = None
    if source.stacked is not None and expert is not None:
        rows, *rest = shape
        all_rows = source.stacked.parts * rows
        stacked = StackedTensor(
            name=source.stacked.name.format(layer=layer),
            shape=(config.num_experts, *((*rest, all_rows) if source.stacked.transposed else (all_rows, *rest))),
            expert=expert,
            rows=rows,
            layout=source.stacked,
        )
    return HFTensor(source.name.format(layer=layer, expert=expert), shape, stacked)
