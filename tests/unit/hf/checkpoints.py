"""Tiny random Qwen3-MoE checkpoints, and the slow obvious description of Megatron's layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.exporter import join_shards, split_full
from megatron_rl.hf.importer import ParamRef, load_shard
from megatron_rl.hf.names import parse_parameter_name
from megatron_rl.hf.reader import SafetensorsReader

# Every dimension differs from every other, so that a transposed or exchanged tensor cannot fit by accident.
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=28,
    moe_intermediate_size=20,
    num_experts=6,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense_layers": {"mlp_only_layers": [2], "norm_topk_prob": False},
    "sparse_step": {"decoder_sparse_step": 2, "tie_word_embeddings": True},
}


def make_model(seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A model whose every tensor, norms included, is random."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**SIZES | overrides), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=generator) + ("norm" in name))
    return model.eval()


def make_checkpoint(path: Path, **overrides: Any) -> Path:
    make_model(**overrides).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: value.clone() for name, value in load_file(path / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of ... removes the key."""
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of an imagined Megatron model; layers are cut into pp equal stages."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    te: bool = False


def padded_vocab(config: HFModelConfig, tp: int) -> int:
    return -(-config.vocab_size // (4 * tp)) * 4 * tp


def live_names(config: HFModelConfig, layout: Layout, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(live parameter name, local shape) on every rank of pipeline stage pp."""
    hidden, per_stage = config.hidden_size, config.num_layers // layout.pp
    vocab = (padded_vocab(config, layout.tp) // layout.tp, hidden)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if pp == 0:
        yield "module.embedding.word_embeddings.weight", vocab
    for i in range(per_stage):
        is_moe = pp * per_stage + i in config.moe_layers
        at = f"module.decoder.layers.{i}."
        fused = at + "self_attention.linear_qkv.layer_norm_weight"
        yield (fused if layout.te else at + "input_layernorm.weight"), (hidden,)
        yield at + "self_attention.linear_qkv.weight", ((q + 2 * kv) // layout.tp, hidden)
        yield at + "self_attention.q_layernorm.weight", (config.head_dim,)
        yield at + "self_attention.k_layernorm.weight", (config.head_dim,)
        yield at + "self_attention.linear_proj.weight", (hidden, q // layout.tp)
        fused = at + "mlp.linear_fc1.layer_norm_weight"
        yield (fused if layout.te and not is_moe else at + "pre_mlp_layernorm.weight"), (hidden,)
        if not is_moe:
            yield at + "mlp.linear_fc1.weight", (2 * config.ffn_size // layout.tp, hidden)
            yield at + "mlp.linear_fc2.weight", (hidden, config.ffn_size // layout.tp)
            continue
        yield at + "mlp.router.weight", (config.num_experts, hidden)
        for e in range(config.num_experts // layout.ep):
            for fc, rows in (("linear_fc1", 2), ("linear_fc2", 1)):
                local, grouped = f"local_experts.{e}.{fc}.weight", f"{fc}.weight{e}"
                cut = config.moe_ffn_size // layout.etp
                yield (
                    at + "mlp.experts." + (grouped if layout.te else local),
                    ((rows * cut, hidden) if rows == 2 else (hidden, cut)),
                )
    if pp == layout.pp - 1:
        yield "module.decoder.final_layernorm.weight", (hidden,)
        yield "module.output_layer.weight", vocab if config.head == "lm" else (1, hidden)


def references(config: HFModelConfig, layout: Layout) -> Iterator[list[ParamRef]]:
    """Each parameter of the whole model once, as the references of its tensor-parallel ranks in order."""
    for pp in range(layout.pp):
        for name, shape in live_names(config, layout, pp):
            parsed = parse_parameter_name(name, value_head=config.head == "value")
            layer = None if parsed.layer is None else pp * (config.num_layers // layout.pp) + parsed.layer
            expert_ranks = 1 if parsed.expert is None else layout.ep
            tp = layout.tp if parsed.expert is None else layout.etp
            for ep in range(expert_ranks):
                expert = None if parsed.expert is None else ep * (config.num_experts // layout.ep) + parsed.expert
                yield [ParamRef(parsed.canonical, layer, expert, rank, tp, shape) for rank in range(tp)]


def round_trip(reader: SafetensorsReader, config: HFModelConfig, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Import every shard, join, split again."""
    for refs in references(config, layout):
        full = join_shards(refs[0].canonical, [load_shard(reader, config, ref) for ref in refs], config)
        yield from split_full(refs[0].canonical, full, config, layer=refs[0].layer, expert=refs[0].expert)


def slow_shard(hf: dict[str, Tensor], config: HFModelConfig, ref: ParamRef) -> Tensor:
    """Megatron's layout written out row by row, from the names up, sharing nothing with the package."""
    at = "" if ref.layer is None else f"model.layers.{ref.layer}."
    kind = ref.canonical.removesuffix(".weight")
    rank, size = ref.tp_rank, ref.tp_size
    plain = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "mlp.router": "mlp.gate",
        "decoder.final_layernorm": "model.norm",
        "value_head": "score",
    }
    if kind in plain:
        return hf[f"{at}{plain[kind]}.weight"]
    if kind in ("embedding.word_embeddings", "output_layer"):
        lm_head = kind == "output_layer" and not config.tied_embeddings
        table = hf["lm_head.weight" if lm_head else "model.embed_tokens.weight"]
        first = rank * ref.shape[0]
        zero = torch.zeros(config.hidden_size)
        return torch.stack([table[i] if i < len(table) else zero for i in range(first, first + ref.shape[0])])
    if kind == "self_attention.linear_qkv":
        q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
        per_group, per_rank, d = config.num_heads // config.num_kv_heads, config.num_kv_heads // size, config.head_dim
        rows = []
        for group in range(rank * per_rank, (rank + 1) * per_rank):
            for head in range(group * per_group, (group + 1) * per_group):
                rows += [q[head * d + i] for i in range(d)]
            rows += [k[group * d + i] for i in range(d)]
            rows += [v[group * d + i] for i in range(d)]
        return torch.stack(rows)
    mlp = at + ("mlp." if ref.expert is None else f"mlp.experts.{ref.expert}.")
    if kind.endswith("linear_fc1"):
        gate, up = hf[mlp + "gate_proj.weight"], hf[mlp + "up_proj.weight"]
        n = len(gate) // size
        return torch.stack([gate[rank * n + i] for i in range(n)] + [up[rank * n + i] for i in range(n)])
    whole = hf[at + "self_attn.o_proj.weight"] if kind == "self_attention.linear_proj" else hf[mlp + "down_proj.weight"]
    n = whole.shape[1] // size
    return torch.stack([whole[:, rank * n + i] for i in range(n)], 1)
