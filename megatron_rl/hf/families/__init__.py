"""Families by HF `model_type`. Another family is another module with a `Family`."""

from __future__ import annotations

from megatron_rl.hf.families import deepseek, dense, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from megatron_rl.hf.families.family import Family
from megatron_rl.hf.table import Head, ParamRule

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        qwen3_moe.FAMILY,
        qwen2_moe.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        glm4_moe.FAMILY,
        deepseek.V2,
        deepseek.V3,
        gpt_oss.FAMILY,
        dense.QWEN3,
        dense.LLAMA,
    )
}
TABLES: dict[str, tuple[ParamRule, ...]] = {name: family.table for name, family in FAMILIES.items()}
ARCHITECTURES: dict[str, dict[str, Head]] = {name: family.architectures for name, family in FAMILIES.items()}
REFUSED: dict[str, str] = {
    "qwen3_next": (
        "its linear-attention layers (gated delta net) need packed sequences, which Megatron-Core's GatedDeltaNet "
        "refuses, and the flash-linear-attention library; its norms scale by 1 + weight, which is not in the table"
    ),
}
"""Known families and what is missing for each."""
