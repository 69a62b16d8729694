"""Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value, full_attention_only, sparse_layers
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings

TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    *rules.HEAD_NORMS,
    *rules.DENSE,
    rules.router(),
    *rules.experts(rules.LAYER + "mlp.experts."),
    *rules.HEADS,
)


def _read(raw: Settings) -> dict[str, Any]:
    full_attention_only(raw)
    raw.only("unsupported model setting", attention_bias=(False, None), hidden_act=("silu",))
    return dict(
        ffn_size=raw.size("intermediate_size"),
        moe_ffn_size=raw.size("moe_intermediate_size"),
        num_experts=raw.size("num_local_experts" if "num_local_experts" in raw.values else "num_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        moe_layers=sparse_layers(raw),
        qk_norm="head",
        **read_rotary(raw),
    )


FAMILY = Family("qwen3_moe", causal_and_value("Qwen3Moe"), TABLE, _read)
