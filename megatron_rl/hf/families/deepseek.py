"""DeepSeek-V2 and V3: latent attention and shared experts; V3 routes by sigmoid with a bias, V2 by softmax."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.architecture import Groups, Latent, Router
from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value, layers_after_dense
from megatron_rl.hf.families.glm4_moe import sigmoid_router
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import ParamRule, Size, Source, Split


def _projection(name: str, split: Split, hf: str, shape: tuple[Size, Size], when: str | None = None) -> ParamRule:
    source = (Source(f"{rules.ATTENTION}{hf}.weight", shape),)
    return ParamRule(f"self_attention.{name}.weight", split, "layer", source, when=when)


LATENT = (
    _projection("linear_q_proj", "rows", "q_proj", ("q", "hidden"), "projects_query"),
    _projection("linear_q_down_proj", "replicated", "q_a_proj", ("q_rank", "hidden"), "compresses_query"),
    rules.norm(
        "self_attention.q_layernorm.weight",
        rules.ATTENTION + "q_a_layernorm.weight",
        "q_rank",
        when="compresses_query",
    ),
    _projection("linear_q_up_proj", "rows", "q_b_proj", ("q", "q_rank"), "compresses_query"),
    _projection("linear_kv_down_proj", "replicated", "kv_a_proj_with_mqa", ("kv_rank_and_rope", "hidden")),
    rules.norm("self_attention.kv_layernorm.weight", rules.ATTENTION + "kv_a_layernorm.weight", "kv_rank"),
    _projection("linear_kv_up_proj", "rows", "kv_b_proj", ("kv_expanded", "kv_rank")),
    _projection("linear_proj", "columns", "o_proj", ("hidden", "attention_out")),
)
"""Compressions are whole on every rank, as in Megatron's Transformer Engine layers; no rows are permuted."""

_REST = (
    *rules.DENSE,
    rules.router(),
    rules.EXPERT_BIAS,
    *rules.experts(rules.LAYER + "mlp.experts."),
    *rules.SHARED_EXPERTS,
    *rules.HEADS,
)
TABLE = (rules.EMBEDDING, *rules.LAYER_NORMS, *LATENT, *_REST)


def _read_v3(raw: Settings) -> dict[str, Any]:
    raw.only("Megatron-Core rotates neighbouring pairs", rope_interleave=(True, None))
    return _read(raw) | sigmoid_router(raw) | dict(mtp_layers=raw.count("num_nextn_predict_layers"))


def _read_v2(raw: Settings) -> dict[str, Any]:
    methods = ("greedy", "group_limited_greedy")
    raw.only("unsupported model setting", mlp_bias=(False, None), topk_method=methods)
    # transformers, and the model's own code for these methods, never normalise whatever the setting says.
    raw.only("unsupported model setting", norm_topk_prob=(False, None))
    grouped = raw.get("topk_method") == "group_limited_greedy"
    groups = Groups(raw.size("n_group"), raw.size("topk_group"), best=1) if grouped else None
    router = Router(scaling=raw.positive("routed_scaling_factor", 1.0), groups=groups)
    return _read(raw) | dict(norm_topk_prob=False, router=router)


def _read(raw: Settings) -> dict[str, Any]:
    heads = raw.size("num_attention_heads")
    raw.only("unsupported model setting", hidden_act=("silu",), attention_bias=(False, None))
    raw.only("latent attention has a key per query head", num_key_value_heads=(heads, None))
    plain, rope = raw.size("qk_nope_head_dim"), raw.size("qk_rope_head_dim")
    q_rank = raw.get("q_lora_rank")
    ffn = raw.size("moe_intermediate_size")
    rotary = read_rotary(raw, "yarn")
    if not rotary["rotary"].whole_dimensions:
        raise raw.fault("truncate", False, "true", "unsupported rotary scaling")
    return dict(
        head_dim=plain + rope,
        latent=Latent(
            q_rank=None if q_rank is None else raw.size("q_lora_rank"),
            kv_rank=raw.size("kv_lora_rank"),
            plain_dim=plain,
            rope_dim=rope,
            value_dim=raw.size("v_head_dim"),
        ),
        ffn_size=raw.size("intermediate_size"),
        moe_ffn_size=ffn,
        num_experts=raw.size("n_routed_experts"),
        topk=raw.size("num_experts_per_tok"),
        moe_layers=layers_after_dense(raw),
        shared_ffn_size=ffn * raw.size("n_shared_experts"),
        **rotary,
    )


V2 = Family("deepseek_v2", causal_and_value("DeepseekV2"), TABLE, _read_v2)
V3 = Family("deepseek_v3", causal_and_value("DeepseekV3"), TABLE, _read_v3)
