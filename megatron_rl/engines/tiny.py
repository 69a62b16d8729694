"""A tiny Qwen3-MoE checkpoint in HF format, with its vocabulary beside it: for tests and for runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.environments.vocabulary import VOCABULARY_FILE, Vocabulary


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the tiny model; the defaults give 0.46 M parameters with a vocabulary of 32."""

    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_experts: int = 8
    topk: int = 2
    moe_hidden_size: int = 64
    """Width of one expert."""
    dense_layers: tuple[int, ...] = ()
    """0-based decoder layers with a dense MLP (of twice the hidden size) instead of experts."""
    max_positions: int = 512
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    init_std: float = 0.08
    """Standard deviation of every weight. 0.02, HF's default, leaves logits of so narrow a model all but equal."""

    def hf_config(self, vocab_size: int) -> Qwen3MoeConfig:
        """The same sizes as a `transformers` configuration with a vocabulary of `vocab_size` ids."""
        sizes: dict[str, Any] = dict(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            num_experts_per_tok=self.topk,
            moe_intermediate_size=self.moe_hidden_size,
            mlp_only_layers=list(self.dense_layers),
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=self.tie_embeddings,
            attention_dropout=0.0,
            initializer_range=self.init_std,
        )
        return Qwen3MoeConfig(**sizes)


def write_tiny_checkpoint(
    path: str | Path, vocabulary: Vocabulary, shape: TinyShape | None = None, *, seed: int = 0
) -> int:
    """Write random float32 weights, `config.json` and `vocabulary.json` into the directory `path`.

    Norm weights are drawn around 1, so that a converter which drops or swaps one is detected. The same seed and shape
    give the same bytes. The caller's random state is left as it was.

    Args:
        path: directory, made if it does not exist.
        vocabulary: gives the number of embeddings.
        shape: sizes; None: the defaults of `TinyShape`.
        seed: of all weights.

    Returns:
        The number of parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM((shape or TinyShape()).hf_config(len(vocabulary)))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight.normal_(mean=1.0, std=0.05)
    model.save_pretrained(path)
    vocabulary.save(Path(path) / VOCABULARY_FILE)
    return sum(weight.numel() for weight in model.parameters())
