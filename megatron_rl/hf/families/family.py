"""What a family module declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import Head, ParamRule


@dataclass(frozen=True)
class Family:
    """One HF `model_type`."""

    model_type: str
    architectures: dict[str, Head]
    """HF class name → which head it carries."""
    table: tuple[ParamRule, ...]
    read: Callable[[Settings], dict[str, Any]]
    """config.json → the fields of `HFModelConfig` that are its own; refuses what the conversion does not support."""


def causal_and_value(stem: str) -> dict[str, Head]:
    """The two classes of transformers: `StemForCausalLM` and `StemForTokenClassification`."""
    return {f"{stem}ForCausalLM": "lm", f"{stem}ForTokenClassification": "value"}


def sparse_layers(raw: Settings) -> tuple[int, ...]:
    """Qwen: layer i has experts unless it is in `mlp_only_layers` or i + 1 is no multiple of `decoder_sparse_step`."""
    step, dense = raw.size("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    return tuple(i for i in range(raw.size("num_hidden_layers")) if i not in dense and (i + 1) % step == 0)


def layers_after_dense(raw: Settings) -> tuple[int, ...]:
    """DeepSeek and GLM: the first `first_k_dense_replace` layers are dense."""
    return tuple(range(raw.count("first_k_dense_replace"), raw.size("num_hidden_layers")))


def full_attention_only(raw: Settings) -> None:
    """Refuse sliding windows."""
    raw.only("unsupported model setting", use_sliding_window=(False, None))
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise raw.fault("layer_types", sorted(kinds), "only full_attention", "unsupported model setting")
