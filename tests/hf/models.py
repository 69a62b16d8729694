"""A tiny model of every family, every tensor random and its dimensions pairwise distinct, so that no swap hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LAYERS = 4


def _rope(theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


_COMMON = dict(
    vocab_size=62, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
_ROUTED = dict(num_experts_per_tok=2, intermediate_size=80, moe_intermediate_size=24)
# Latent attention has head widths of its own.
_LATENT = {name: value for name, value in _COMMON.items() if name != "head_dim"} | dict(
    num_key_value_heads=4, kv_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=10,
    intermediate_size=80, moe_intermediate_size=22, n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=3,
    n_group=4, topk_group=2, first_k_dense_replace=1,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1, mscale=0.707,
    mscale_all_dim=0.707,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(
        _COMMON, **_ROUTED, num_experts=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **_rope()
    ),
    "qwen2_moe": dict(
        _COMMON, **_ROUTED, num_experts=8, norm_topk_prob=False, mlp_only_layers=[1], use_sliding_window=False,
        shared_expert_intermediate_size=40, **_rope(),
    ),
    "mixtral": dict(_COMMON, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
                    **_rope(1e6)),
    # Its norms are as wide as the hidden state, which fixes the head's width.
    "olmoe": {k: v for k, v in _COMMON.items() if k != "head_dim"}
    | dict(intermediate_size=20, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, **_rope()),
    "glm4_moe": dict(
        _COMMON, **_ROUTED, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, use_qk_norm=True,
        attention_bias=True, routed_scaling_factor=1.5, norm_topk_prob=True, n_group=1, topk_group=1,
        num_nextn_predict_layers=0, **_rope(partial_rotary_factor=0.5),
    ) | dict(moe_intermediate_size=22),
    "deepseek_v3": dict(
        _LATENT, q_lora_rank=20, routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=0,
        **_rope(),
    ),
    "deepseek_v2": dict(
        _LATENT, q_lora_rank=None, routed_scaling_factor=1.25, topk_method="group_limited_greedy",
        **_rope(**_YARN),
    ),
    "gpt_oss": dict(
        _COMMON, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2, swiglu_limit=0.5,
        **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    ),
    "qwen3": dict(_COMMON, intermediate_size=80, **_rope()),
    "llama": dict(_COMMON, intermediate_size=80, **_rope(5e5)),
}  # fmt: skip


def write_model(path: Path, family: str, **changes: Any) -> Path:
    """Save a random checkpoint of a family."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator) + ("norm" in name))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path)
    return path
