"""gpt-oss: attention sinks, sliding windows, a clamped gate, biases everywhere, and experts stored as stacks only."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.architecture import Clamp, Router, Window
from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import ParamRule, Size, Source, Split, Stacked

_MLP = rules.LAYER + "mlp."


def _part(stack: str, name: str, shape: tuple[Size, ...], part: int = 0, parts: int = 1) -> Source:
    """gate and up alternate row by row, and matrices are stored transposed."""
    layout = Stacked(f"{_MLP}experts.{stack}", part, parts, interleaved=parts > 1, transposed=len(shape) > 1, only=True)
    return Source(f"{_MLP}experts.{{expert}}.{name}", shape, layout)


def _expert(canonical: str, split: Split, *sources: Source) -> ParamRule:
    return ParamRule(f"mlp.experts.{canonical}", split, "expert", sources, may_be_constant=canonical.endswith("bias"))


def _bias(canonical: str, name: str, split: Split, size: Size, scope: Any = "layer") -> ParamRule:
    return ParamRule(canonical, split, scope, (Source(name, (size,)),), may_be_constant=True)


_GATE_UP: tuple[Size, Size] = ("moe_ffn", "hidden")
TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    _bias("self_attention.linear_proj.bias", rules.ATTENTION + "o_proj.bias", "replicated", "hidden"),
    _bias("self_attention.core_attention.softmax_offset", rules.ATTENTION + "sinks", "rows", "heads"),
    rules.router(_MLP + "router.weight"),
    _bias("mlp.router.bias", _MLP + "router.bias", "replicated", "experts", "moe"),
    _expert(
        "linear_fc1.weight",
        "glu",
        *(_part("gate_up_proj", f"{name}_proj.weight", _GATE_UP, i, 2) for i, name in enumerate(("gate", "up"))),
    ),
    _expert(
        "linear_fc1.bias",
        "glu",
        *(_part("gate_up_proj_bias", f"{name}_proj.bias", ("moe_ffn",), i, 2) for i, name in enumerate(("gate", "up"))),
    ),
    _expert("linear_fc2.weight", "columns", _part("down_proj", "down_proj.weight", ("hidden", "moe_ffn"))),
    _expert("linear_fc2.bias", "replicated", _part("down_proj_bias", "down_proj.bias", ("hidden",))),
    *rules.HEADS,
)


def _read(raw: Settings) -> dict[str, Any]:
    # The default of the class; Megatron's gate has it built in.
    raw.only("unsupported gate", swiglu_alpha=(1.702,), hidden_act=("silu",))
    raw.only("unsupported model setting", attention_bias=(True,))
    layers, ffn = raw.size("num_hidden_layers"), raw.size("intermediate_size")
    kinds = raw.get("layer_types") or ["sliding_attention", "full_attention"] * layers
    if not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise raw.fault("layer_types", sorted(set(kinds)), "sliding_attention or full_attention")
    windowed = tuple(i for i in range(layers) if kinds[i] == "sliding_attention")
    return dict(
        ffn_size=ffn,
        moe_ffn_size=ffn,
        num_experts=raw.size("num_local_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=True,
        moe_layers=tuple(range(layers)),
        router=Router(linear_bias=True),
        qkv_bias=True,
        linear_bias=True,
        window=Window(raw.size("sliding_window"), windowed) if windowed else None,
        sinks=True,
        clamp=Clamp(raw.positive("swiglu_limit", 7.0)),
        **read_rotary(raw, "yarn"),
    )


FAMILY = Family("gpt_oss", causal_and_value("GptOss"), TABLE, _read)
