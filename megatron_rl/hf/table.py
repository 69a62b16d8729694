"""What a family's table is made of: one rule per Megatron parameter.

Canonical names are Megatron's parameter names of the non-fused layer spec, without the `decoder.layers.N.` prefix and
without the expert number: `self_attention.linear_qkv.weight`, `mlp.experts.linear_fc1.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Size = Literal[
    "vocab", "hidden", "heads", "q", "kv", "head_dim", "ffn", "moe_ffn", "shared_ffn", "experts", "one",
    "attention_out", "q_rank", "kv_rank", "kv_rank_and_rope", "kv_expanded",
]  # fmt: skip
"""A dimension by meaning; `HFModelConfig.size` turns it into a number.

q and kv are heads times head_dim, attention_out is what the output projection reads. In latent attention q_rank and
kv_rank are the widths of the compressed query and key-value, kv_rank_and_rope adds the shared rotary key, and
kv_expanded is heads times (key part without rotation + value).
"""

Split = Literal["replicated", "rows", "columns", "glu", "qkv", "vocab"]
"""How tensor parallelism cuts a parameter.

* `replicated`: every rank holds all of it.
* `rows`, `columns`: equal cuts of dimension 0 or 1.
* `glu`: sources [gate; up]; rank r holds [gate_r; up_r].
* `qkv`: sources q, k, v, rows interleaved per query group (its q heads, its k head, its v head); ranks hold groups.
* `vocab`: rows, padded at the end to a multiple of the ranks; the padding is zero here and absent in HF.
"""

Scope = Literal["model", "layer", "dense", "moe", "expert"]
"""Where a parameter occurs: once, in every layer, in dense layers, in MoE layers, or for every expert of those."""


Head = Literal["lm", "value"]
"""`lm`: vocabulary logits, a policy. `value`: one output per token, a critic."""


@dataclass(frozen=True)
class Stacked:
    """Where the same values lie when a layer's experts are stored as one tensor [E, parts * rows, columns]."""

    name: str
    """HF name with `{layer}`."""
    part: int
    """0-based block of rows that is this source."""
    parts: int
    """Blocks of equal height in the stacked tensor."""
    interleaved: bool = False
    """Row i of the stacked tensor belongs to part i % parts; otherwise parts follow one another."""
    transposed: bool = False
    """Stored as [E, columns, parts * rows]."""
    only: bool = False
    """The family stores nothing but the stack: names without it never occur in a checkpoint."""


@dataclass(frozen=True)
class Source:
    """One HF tensor."""

    name: str
    """HF name; `{layer}` and `{expert}` stand for 0-based numbers."""
    shape: tuple[Size, ...]
    stacked: Stacked | None = None


@dataclass(frozen=True)
class ParamRule:
    """One Megatron parameter: its HF tensors, in order, and how tensor parallelism cuts it."""

    canonical: str
    split: Split
    scope: Scope
    sources: tuple[Source, ...]
    may_be_constant: bool = False
    """Norms start as ones, biases and a value head as zeros; any other tensor of equal entries was never loaded."""
    head: Head | None = None
    """Exists only in models with this head."""
    when: str | None = None
    """Name of the `HFModelConfig` property that says whether a model has it; None: every model of the family."""
    tied_to: str | None = None
    """Canonical name it shares values with when embeddings are tied; HF then stores only the other one."""


KEPT_DTYPE = ("mlp.router.expert_bias",)
"""Canonical names stored in float32 whatever the weights are: rounding them would move choices of experts."""
