"""OLMoE: queries and keys are normalised over all heads together."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import ParamRule, Size, Source


def _norm(side: str, size: Size) -> ParamRule:
    """Heads are cut over ranks, and the norm's weights with them."""
    source = (Source(f"{rules.ATTENTION}{side}_norm.weight", (size,)),)
    return ParamRule(f"self_attention.{side}_layernorm.weight", "rows", "layer", source, may_be_constant=True)


TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    _norm("q", "q"),
    _norm("k", "kv"),
    rules.router(),
    *rules.experts(rules.LAYER + "mlp.experts."),
    *rules.HEADS,
)


def _read(raw: Settings) -> dict[str, Any]:
    raw.only("unsupported model setting", hidden_act=("silu",), attention_bias=(False, None), clip_qkv=(None,))
    ffn = raw.size("intermediate_size")
    return dict(
        ffn_size=ffn,
        moe_ffn_size=ffn,
        num_experts=raw.size("num_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        moe_layers=tuple(range(raw.size("num_hidden_layers"))),
        qk_norm="all",
        **read_rotary(raw),
    )


FAMILY = Family("olmoe", causal_and_value("Olmoe"), TABLE, _read)
