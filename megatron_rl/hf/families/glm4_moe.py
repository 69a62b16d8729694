"""GLM-4.5-MoE: sigmoid routing with a bias, a shared expert, rotation of a part of each head."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.architecture import Groups, Router
from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value, layers_after_dense
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings

TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    *rules.HEAD_NORMS,
    *rules.DENSE,
    rules.router(),
    rules.EXPERT_BIAS,
    *rules.experts(rules.LAYER + "mlp.experts."),
    *rules.SHARED_EXPERTS,
    *rules.HEADS,
)


def sigmoid_router(raw: Settings) -> dict[str, Any]:
    """Fields of a router that scores by sigmoid, corrects the choice by a bias and normalises its gates."""
    raw.only("gates of a sigmoid router are always normalised by Megatron-Core", norm_topk_prob=(True,))
    count = raw.size("n_group", 1)
    groups = Groups(count, raw.size("topk_group"), best=2) if count > 1 else None
    scaling = raw.positive("routed_scaling_factor", 1.0)
    return dict(norm_topk_prob=True, router=Router("sigmoid", expert_bias=True, scaling=scaling, groups=groups))


def _read(raw: Settings) -> dict[str, Any]:
    raw.only("unsupported model setting", hidden_act=("silu",))
    ffn = raw.size("moe_intermediate_size")
    return dict(
        ffn_size=raw.size("intermediate_size"),
        moe_ffn_size=ffn,
        num_experts=raw.size("n_routed_experts"),
        topk=raw.size("num_experts_per_tok"),
        moe_layers=layers_after_dense(raw),
        shared_ffn_size=ffn * raw.size("n_shared_experts"),
        qk_norm="head" if raw.flag("use_qk_norm", False) else "none",
        qkv_bias=raw.flag("attention_bias", False),
        mtp_layers=raw.count("num_nextn_predict_layers"),
        **sigmoid_router(raw),
        **read_rotary(raw, partial=True),
    )


FAMILY = Family("glm4_moe", causal_and_value("Glm4Moe"), TABLE, _read)
