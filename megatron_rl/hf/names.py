"""Parameter names of a live Megatron model → canonical names.

Two naming schemes exist. The Transformer Engine spec fuses a norm into the linear layer behind it
(`self_attention.linear_qkv.layer_norm_weight`) and ends in the number of a grouped expert
(`mlp.experts.linear_fc1.weight3`); the local spec keeps norms apart and numbers experts as modules
(`mlp.experts.local_experts.3.linear_fc1.weight`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}


@dataclass(frozen=True)
class ParamName:
    """A live parameter's name, taken apart."""

    canonical: str
    """Name without layer and expert numbers, equal under both schemes."""
    layer: int | None
    """As named: 0-based *within the pipeline stage*; the layer module's `layer_number` gives the global one."""
    expert: int | None
    """Local expert, 0-based within the expert-parallel rank; None: not an expert."""


def parse_parameter_name(name: str, *, value_head: bool = False) -> ParamName:
    """Take a live parameter's name apart.

    Args:
        name: as `named_parameters()` gives it; leading `module.` of wrappers is dropped.
        value_head: the model is a critic, whose `output_layer` is the value head and not the vocabulary.

    Unknown names pass through unchanged: looking them up in a family's table (`inventory.rule_for`) refuses them.
    """
    while name.startswith("module."):
        name = name[len("module.") :]
    layer = None
    if match := _LAYER.fullmatch(name):
        layer, name = int(match[1]), match[2]
    if value_head and name == "output_layer.weight":
        name = "value_head.weight"
    if match := _GROUPED_EXPERT.fullmatch(name):
        return ParamName(f"mlp.experts.{match[1]}.{match[2]}", layer, int(match[3]))
    if match := _LOCAL_EXPERT.fullmatch(name):
        return ParamName(f"mlp.experts.{match[2]}.{match[3]}", layer, int(match[1]))
    return ParamName(_FUSED_NORMS.get(name, name), layer, None)
