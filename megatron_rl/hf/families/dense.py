"""Dense models, for critics of another size than the policy: Qwen3 and Llama."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value, full_attention_only
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings

_LLAMA = (rules.EMBEDDING, *rules.LAYER_NORMS, *rules.GROUPED_QUERY, *rules.DENSE, *rules.HEADS)
_QWEN3 = (*_LLAMA, *rules.HEAD_NORMS)


def _read_qwen3(raw: Settings) -> dict[str, Any]:
    full_attention_only(raw)
    return _read(raw) | dict(qk_norm="head", **read_rotary(raw))


def _read_llama(raw: Settings) -> dict[str, Any]:
    raw.only("unsupported model setting", mlp_bias=(False, None))
    return _read(raw) | read_rotary(raw, "llama3")


def _read(raw: Settings) -> dict[str, Any]:
    raw.only("unsupported model setting", hidden_act=("silu",), attention_bias=(False, None))
    return dict(ffn_size=raw.size("intermediate_size"))


QWEN3 = Family("qwen3", causal_and_value("Qwen3"), _QWEN3, _read_qwen3)
LLAMA = Family("llama", causal_and_value("Llama"), _LLAMA, _read_llama)
