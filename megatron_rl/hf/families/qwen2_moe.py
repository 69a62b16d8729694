"""Qwen2-MoE (Qwen1.5-MoE): biases on queries, keys and values, and a gated shared expert."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value, full_attention_only, sparse_layers
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import ParamRule, Source

TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    *rules.DENSE,
    rules.router(),
    *rules.experts(rules.LAYER + "mlp.experts."),
    *rules.gated("mlp.shared_experts", rules.LAYER + "mlp.shared_expert.", "shared_ffn", "moe"),
    ParamRule(
        "mlp.shared_experts.gate_weight",
        "replicated",
        "moe",
        (Source(rules.LAYER + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
    ),
    *rules.HEADS,
)


def _read(raw: Settings) -> dict[str, Any]:
    full_attention_only(raw)
    raw.only("unsupported model setting", hidden_act=("silu",))
    return dict(
        ffn_size=raw.size("intermediate_size"),
        moe_ffn_size=raw.size("moe_intermediate_size"),
        num_experts=raw.size("num_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        moe_layers=sparse_layers(raw),
        qkv_bias=raw.flag("qkv_bias", True),
        shared_ffn_size=raw.size("shared_expert_intermediate_size"),
        shared_gate=True,
        **read_rotary(raw),
    )


FAMILY = Family("qwen2_moe", causal_and_value("Qwen2Moe"), TABLE, _read)
