"""Families by HF `model_type`. Another family is another module with a TABLE and its ARCHITECTURES."""

from __future__ import annotations

from megatron_rl.hf.families import qwen3_moe
from megatron_rl.hf.table import Head, ParamRule

TABLES: dict[str, tuple[ParamRule, ...]] = {"qwen3_moe": qwen3_moe.TABLE}
ARCHITECTURES: dict[str, dict[str, Head]] = {"qwen3_moe": qwen3_moe.ARCHITECTURES}
