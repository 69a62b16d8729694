"""A slow, plain Qwen3-MoE decoder (policy or critic) in float64: one sequence, one token, one expert at a time.

Axis letters: N tokens of a sequence, L MoE layers, k top-k, H hidden, V vocabulary. Names of weights are those of an
HF checkpoint on disk; a critic has `score.weight` [1, H] in place of `lm_head.weight` [V, H].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """Constants of the architecture that shapes of weights do not determine."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    topk: int
    norm_topk_prob: bool
    rope_theta: float
    rms_eps: float
    moe_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Architecture:
        """From a parsed `config.json`, with the rotary base in `rope_parameters` or at the top."""
        layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or []
        rope = config.get("rope_parameters") or config
        return cls(
            layers=layers,
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            topk=config["num_experts_per_tok"],
            norm_topk_prob=config["norm_topk_prob"],
            rope_theta=rope["rope_theta"],
            rms_eps=config["rms_norm_eps"],
            moe_layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        )


@dataclass(frozen=True)
class Forward:
    """Result of the forward pass of one sequence."""

    hidden: Tensor
    """float64 [N, H], after the final norm."""
    routes: Tensor
    """int64 [L, N, k]: experts used, in order of falling router logit where native, as given where replayed."""
    native: Tensor
    """int64 [L, N, k]: experts of the k largest router logits."""
    margins: Tensor
    """float64 [L, N]: router logit of the k-th expert minus that of the next; where small, rounding may swap them."""


def load(state_dict: Mapping[str, Tensor]) -> Weights:
    """Float64 leaves that require gradients, from a state dict with one tensor per expert matrix."""
    return {name: tensor.detach().double().clone().requires_grad_() for name, tensor in state_dict.items()}


def forward(arch: Architecture, weights: Weights, tokens: Tensor, routes: Tensor | None = None) -> Forward:
    """Run one sequence.

    Args:
        tokens: int64 [N].
        routes: int64 [L, n, k] with n ≤ N: replayed experts of the first n tokens; a row with a negative id, and every
            row beyond n, routes natively. Gate weights always come from the router's own logits.
    """
    x = weights["model.embed_tokens.weight"][tokens]
    used, native, margins = [], [], []
    for layer in range(arch.layers):
        prefix = f"model.layers.{layer}"
        x = x + _attention(arch, weights, prefix, _norm(arch, weights[f"{prefix}.input_layernorm.weight"], x))
        normed = _norm(arch, weights[f"{prefix}.post_attention_layernorm.weight"], x)
        if layer in arch.moe_layers:
            logits = normed @ weights[f"{prefix}.mlp.gate.weight"].T
            ranked = logits.detach().sort(dim=-1, descending=True)
            native.append(ranked.indices[:, : arch.topk])
            margins.append(_margin(ranked.values, arch.topk))
            used.append(_replay(native[-1], None if routes is None else routes[len(used)]))
            x = x + _experts(arch, weights, f"{prefix}.mlp", normed, logits, used[-1])
        else:
            x = x + _swiglu(weights, f"{prefix}.mlp", normed)
    hidden = _norm(arch, weights["model.norm.weight"], x)
    if not used:
        return Forward(hidden, *[torch.empty(0, len(tokens), arch.topk)] * 2, torch.empty(0, len(tokens)))
    return Forward(hidden, torch.stack(used), torch.stack(native), torch.stack(margins))


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """float64 [N, V]."""
    return hidden @ weights["lm_head.weight"].T


def values_of(weights: Weights, hidden: Tensor) -> Tensor:
    """float64 [N]."""
    return hidden @ weights["score.weight"][0]


def _norm(arch: Architecture, scale: Tensor, x: Tensor) -> Tensor:
    return scale * x / torch.sqrt((x * x).mean(-1, keepdim=True) + arch.rms_eps)


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [N, d]: pair (i, i + d/2) of token t turns by t·theta^(-2i/d)."""
    half = x.shape[1] // 2
    speeds = torch.tensor([theta ** (-2 * i / x.shape[1]) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * speeds
    first, second = x[:, :half], x[:, half:]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, dim=1)


def _attention(arch: Architecture, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """Causal attention, head by head; query head h shares key/value head h // (heads / kv_heads)."""
    d, part = arch.head_dim, f"{prefix}.self_attn"
    q, k, v = (x @ weights[f"{part}.{name}_proj.weight"].T for name in "qkv")
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    outputs = []
    for head in range(arch.heads):
        shared = head // (arch.heads // arch.kv_heads)
        query = _norm(arch, weights[f"{part}.q_norm.weight"], q[:, head * d : (head + 1) * d])
        key = _norm(arch, weights[f"{part}.k_norm.weight"], k[:, shared * d : (shared + 1) * d])
        scores = _rotate(query, arch.rope_theta) @ _rotate(key, arch.rope_theta).T / math.sqrt(d)
        attended = scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, shared * d : (shared + 1) * d]
        outputs.append(attended)
    return torch.cat(outputs, dim=1) @ weights[f"{part}.o_proj.weight"].T


def _swiglu(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    gate, up = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def _experts(arch: Architecture, weights: Weights, prefix: str, x: Tensor, logits: Tensor, used: Tensor) -> Tensor:
    gates = logits.softmax(-1).gather(1, used)
    if arch.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    rows = []
    for t, experts in enumerate(used.tolist()):
        outputs = [gates[t, j] * _swiglu(weights, f"{prefix}.experts.{e}", x[t]) for j, e in enumerate(experts)]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def _replay(native: Tensor, recorded: Tensor | None) -> Tensor:
    used = native.clone()
    for t, row in enumerate([] if recorded is None else recorded):
        if int(row.min()) >= 0:
            used[t] = row
    return used


def _margin(ranked: Tensor, topk: int) -> Tensor:
    if ranked.shape[1] == topk:
        return torch.full((len(ranked),), math.inf, dtype=torch.float64)
    return ranked[:, topk - 1] - ranked[:, topk]
