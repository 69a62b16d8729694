"""Parts of a model that only some families have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rotary:
    """How positions turn queries and keys, beside the base."""

    fraction: float = 1.0
    """Share of a head's dimensions that is rotated, from the front."""
    kind: Literal["default", "yarn", "llama3"] = "default"
    """`yarn`: arXiv 2309.00071; `llama3`: frequencies below a wavelength divided by `factor`."""
    factor: float = 1.0
    """By how much the context was stretched."""
    original_positions: int = 0
    """Context length before stretching."""
    beta_fast: float = 32.0
    """`yarn`: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """`yarn`: rotations below which a dimension is stretched by the whole factor."""
    mscale: float = 1.0
    """`yarn`: weight of the attention temperature in cos and sin."""
    mscale_all_dim: float = 0.0
    """`yarn`: weight of the attention temperature in the softmax scale (latent attention only)."""
    whole_dimensions: bool = True
    """`yarn`: bounds of the ramp are rounded outward to whole dimensions (config.json: `truncate`)."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): widths per head, and of the compressed tensors."""

    q_rank: int | None
    """Width of the compressed query; None: queries are projected in one step."""
    kv_rank: int
    """Width of the compressed keys and values."""
    plain_dim: int
    """Query and key dimensions without rotation."""
    rope_dim: int
    """Query dimensions with rotation; the rotary key is shared by all heads."""
    value_dim: int


@dataclass(frozen=True)
class Groups:
    """Group-limited routing: experts are chosen inside the best groups only (arXiv 2405.04434 §2.1.2)."""

    count: int
    """Equal groups of neighbouring experts."""
    chosen: int
    """Groups a token may use."""
    best: int
    """A group scores the sum of its `best` highest expert scores (1 in DeepSeek-V2, 2 in V3 and GLM-4.5)."""


@dataclass(frozen=True)
class Router:
    """How experts are chosen and weighed, beside their number."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    """A bias per expert, kept out of the gradient, added to scores for the choice only."""
    linear_bias: bool = False
    """The router's own projection has a bias."""
    scaling: float = 1.0
    """Gates are multiplied by this."""
    groups: Groups | None = None


@dataclass(frozen=True)
class Window:
    """Sliding-window attention in some layers."""

    size: int
    """A token sees itself and the size - 1 tokens before it."""
    layers: tuple[int, ...]
    """0-based decoder layers that use it."""


@dataclass(frozen=True)
class Clamp:
    """gpt-oss's gate: min(g, limit) · sigmoid(1.702 · min(g, limit)) · (clamp(u, ±limit) + 1)."""

    limit: float
