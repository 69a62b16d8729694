"""Which parameters a model has, and which HF tensors each one is: the table applied to a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.families import TABLES
from megatron_rl.hf.table import ParamRule, Source


@dataclass(frozen=True)
class StackedTensor:
    """The block of a stacked tensor that holds one expert's matrix: `[expert, first_row : first_row + rows]`."""

    name: str
    shape: tuple[int, ...]
    """[E, parts * rows, columns]."""
    expert: int
    first_row: int


@dataclass(frozen=True)
class HFTensor:
    """One HF tensor by its per-expert name, with the place of the same values in a stacked checkpoint."""

    name: str
    shape: tuple[int, ...]
    stacked: StackedTensor | None


def rule_for(config: HFModelConfig, canonical: str) -> ParamRule:
    """The family's rule for a parameter.

    Raises:
        CheckpointError: this family, with this head, has no such parameter.
    """
    for rule in TABLES[config.model_type]:
        if rule.canonical == canonical and _has_head(config, rule):
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
        if _has_head(config, rule):
            for layer, expert in _places(config, rule):
                yield rule, layer, expert


def is_stored(config: HFModelConfig, rule: ParamRule) -> bool:
    """Whether HF stores this parameter: all but an output layer that is tied to the embedding."""
    return not (config.tied_embeddings and rule.tied_to)


def expected_names(config: HFModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a complete checkpoint with per-expert names."""
    return {
        tensor.name: tensor.shape
        for rule, layer, expert in model_parameters(config)
        if is_stored(config, rule)
        for tensor in hf_tensors(config, rule, layer, expert)
    }


def _has_head(config: HFModelConfig, rule: ParamRule) -> bool:
    return rule.head is None or rule.head == config.head


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
        stacked = StackedTensor(
            name=source.stacked.name.format(layer=layer),
            shape=(config.num_experts, source.stacked.parts * rows, *rest),
            expert=expert,
            first_row=source.stacked.part * rows,
        )
    return HFTensor(source.name.format(layer=layer, expert=expert), shape, stacked)
