"""Qwen3-MoE: the only place where its HF names meet Megatron's."""

from __future__ import annotations

from megatron_rl.hf.table import Head, ParamRule, Scope, Size, Source, Stacked

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_GATE_UP = _LAYER + "mlp.experts.gate_up_proj"
_DOWN = _LAYER + "mlp.experts.down_proj"


def _norm(canonical: str, name: str, size: Size, scope: Scope = "layer") -> ParamRule:
    return ParamRule(canonical, "replicated", scope, (Source(name, (size,)),), may_be_constant=True)


TABLE: tuple[ParamRule, ...] = (
    ParamRule(
        "embedding.word_embeddings.weight",
        "vocab",
        "model",
        (Source("model.embed_tokens.weight", ("vocab", "hidden")),),
    ),
    _norm("input_layernorm.weight", _LAYER + "input_layernorm.weight", "hidden"),
    ParamRule(
        "self_attention.linear_qkv.weight",
        "qkv",
        "layer",
        (
            Source(_LAYER + "self_attn.q_proj.weight", ("q", "hidden")),
            Source(_LAYER + "self_attn.k_proj.weight", ("kv", "hidden")),
            Source(_LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
    ),
    _norm("self_attention.q_layernorm.weight", _LAYER + "self_attn.q_norm.weight", "head_dim"),
    _norm("self_attention.k_layernorm.weight", _LAYER + "self_attn.k_norm.weight", "head_dim"),
    ParamRule(
        "self_attention.linear_proj.weight",
        "columns",
        "layer",
        (Source(_LAYER + "self_attn.o_proj.weight", ("hidden", "q")),),
    ),
    _norm("pre_mlp_layernorm.weight", _LAYER + "post_attention_layernorm.weight", "hidden"),
    ParamRule(
        "mlp.linear_fc1.weight",
        "glu",
        "dense",
        (
            Source(_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            Source(_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    ParamRule(
        "mlp.linear_fc2.weight",
        "columns",
        "dense",
        (Source(_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
    ),
    ParamRule(
        "mlp.router.weight",
        "replicated",
        "moe",
        (Source(_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
    ),
    ParamRule(
        "mlp.experts.linear_fc1.weight",
        "glu",
        "expert",
        (
            Source(_EXPERT + "gate_proj.weight", ("moe_ffn", "hidden"), Stacked(_GATE_UP, part=0, parts=2)),
            Source(_EXPERT + "up_proj.weight", ("moe_ffn", "hidden"), Stacked(_GATE_UP, part=1, parts=2)),
        ),
    ),
    ParamRule(
        "mlp.experts.linear_fc2.weight",
        "columns",
        "expert",
        (Source(_EXPERT + "down_proj.weight", ("hidden", "moe_ffn"), Stacked(_DOWN, part=0, parts=1)),),
    ),
    _norm("decoder.final_layernorm.weight", "model.norm.weight", "hidden", "model"),
    ParamRule(
        "output_layer.weight",
        "vocab",
        "model",
        (Source("lm_head.weight", ("vocab", "hidden")),),
        head="lm",
        tied_to="embedding.word_embeddings.weight",
    ),
    ParamRule(
        "value_head.weight",
        "replicated",
        "model",
        (Source("score.weight", ("one", "hidden")),),
        may_be_constant=True,
        head="value",
    ),
)

ARCHITECTURES: dict[str, Head] = {"Qwen3MoeForCausalLM": "lm", "Qwen3MoeForTokenClassification": "value"}
"""HF class name → which head it carries."""
