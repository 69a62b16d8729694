"""Rules that many families share, as functions of the HF names."""

from __future__ import annotations

from megatron_rl.hf.table import ParamRule, Scope, Size, Source, Stacked

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."


def norm(canonical: str, name: str, size: Size, scope: Scope = "layer", when: str | None = None) -> ParamRule:
    """A replicated vector that starts as ones."""
    return ParamRule(canonical, "replicated", scope, (Source(name, (size,)),), may_be_constant=True, when=when)


def gated(canonical: str, prefix: str, ffn: Size, scope: Scope, when: str | None = None) -> tuple[ParamRule, ParamRule]:
    """The two matrices of a SwiGLU MLP whose HF names are `PREFIX{gate,up,down}_proj.weight`."""
    up = tuple(Source(f"{prefix}{part}_proj.weight", (ffn, "hidden")) for part in ("gate", "up"))
    down = (Source(f"{prefix}down_proj.weight", ("hidden", ffn)),)
    return (
        ParamRule(f"{canonical}.linear_fc1.weight", "glu", scope, up, when=when),
        ParamRule(f"{canonical}.linear_fc2.weight", "columns", scope, down, when=when),
    )


def experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[ParamRule, ...]:
    """Routed experts `PREFIX{expert}.{gate,up,down}.weight`, which may also be stored as one stack per layer."""
    stack = LAYER + "mlp.experts."
    return (
        ParamRule(
            "mlp.experts.linear_fc1.weight",
            "glu",
            "expert",
            tuple(
                Source(
                    f"{prefix}{{expert}}.{name}.weight",
                    ("moe_ffn", "hidden"),
                    Stacked(stack + "gate_up_proj", part=part, parts=2),
                )
                for part, name in enumerate((gate, up))
            ),
        ),
        ParamRule(
            "mlp.experts.linear_fc2.weight",
            "columns",
            "expert",
            (
                Source(
                    f"{prefix}{{expert}}.{down}.weight",
                    ("hidden", "moe_ffn"),
                    Stacked(stack + "down_proj", part=0, parts=1),
                ),
            ),
        ),
    )


def router(name: str = LAYER + "mlp.gate.weight") -> ParamRule:
    """The router's matrix."""
    return ParamRule("mlp.router.weight", "replicated", "moe", (Source(name, ("experts", "hidden")),))


EMBEDDING = ParamRule(
    "embedding.word_embeddings.weight", "vocab", "model", (Source("model.embed_tokens.weight", ("vocab", "hidden")),)
)
HEADS = (
    norm("decoder.final_layernorm.weight", "model.norm.weight", "hidden", "model"),
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
LAYER_NORMS = (
    norm("input_layernorm.weight", LAYER + "input_layernorm.weight", "hidden"),
    norm("pre_mlp_layernorm.weight", LAYER + "post_attention_layernorm.weight", "hidden"),
)
_QKV: tuple[tuple[str, Size], ...] = (("q", "q"), ("k", "kv"), ("v", "kv"))
GROUPED_QUERY = (
    ParamRule(
        "self_attention.linear_qkv.weight",
        "qkv",
        "layer",
        tuple(Source(f"{ATTENTION}{name}_proj.weight", (size, "hidden")) for name, size in _QKV),
    ),
    ParamRule(
        "self_attention.linear_qkv.bias",
        "qkv",
        "layer",
        tuple(Source(f"{ATTENTION}{name}_proj.bias", (size,)) for name, size in _QKV),
        may_be_constant=True,
        when="qkv_bias",
    ),
    ParamRule(
        "self_attention.linear_proj.weight", "columns", "layer", (Source(ATTENTION + "o_proj.weight", ("hidden", "q")),)
    ),
)
HEAD_NORMS = (
    norm("self_attention.q_layernorm.weight", ATTENTION + "q_norm.weight", "head_dim", when="has_qk_norm"),
    norm("self_attention.k_layernorm.weight", ATTENTION + "k_norm.weight", "head_dim", when="has_qk_norm"),
)
DENSE = gated("mlp", LAYER + "mlp.", "ffn", "dense")
EXPERT_BIAS = ParamRule(
    "mlp.router.expert_bias",
    "replicated",
    "moe",
    (Source(LAYER + "mlp.gate.e_score_correction_bias", ("experts",)),),
    may_be_constant=True,
    when="has_expert_bias",
)
SHARED_EXPERTS = gated("mlp.shared_experts", LAYER + "mlp.shared_experts.", "shared_ffn", "moe", "has_shared_expert")
"""As DeepSeek and GLM name them: several experts in one wide MLP."""
