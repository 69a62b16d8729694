"""Mixtral: experts in every layer, named w1, w2, w3."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.families import rules
from megatron_rl.hf.families.family import Family, causal_and_value
from megatron_rl.hf.rotary import read_rotary
from megatron_rl.hf.settings import Settings

_MOE = rules.LAYER + "block_sparse_moe."
TABLE = (
    rules.EMBEDDING,
    *rules.LAYER_NORMS,
    *rules.GROUPED_QUERY,
    rules.router(_MOE + "gate.weight"),
    *rules.experts(_MOE + "experts.", gate="w1", up="w3", down="w2"),
    *rules.HEADS,
)


def _read(raw: Settings) -> dict[str, Any]:
    raw.only("unsupported model setting", hidden_act=("silu",), sliding_window=(None,), router_jitter_noise=(0.0, None))
    ffn = raw.size("intermediate_size")
    return dict(
        ffn_size=ffn,
        moe_ffn_size=ffn,
        num_experts=raw.size("num_local_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=True,
        moe_layers=tuple(range(raw.size("num_hidden_layers"))),
        **read_rotary(raw),
    )


FAMILY = Family("mixtral", causal_and_value("Mixtral"), TABLE, _read)
