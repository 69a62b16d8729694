"""What is played, and the check before the first update."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_rl.config.section import Section


class RolloutConfig(Section):
    """What is played, how much of it, and with which sampling."""

    environment: str = "frozen_lake"
    """Name of a text environment."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment."""
    episodes: int = Field(64, ge=1)
    """Episodes per iteration, over all ranks."""
    max_turns: int = Field(10, ge=1)
    """Turns after which an episode is truncated."""
    max_action_tokens: int = Field(1, ge=1)
    """Tokens the policy may sample per turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer scales its logits by the same."""
    on_bad_record: Literal["error", "quarantine"] = "error"
    """Refuse a batch with a bad trajectory, or set the trajectory aside."""
    engine_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the embedded engine; null: that of the model."""


class GateConfig(Section):
    """The step-0 gate: before the first update, trainer and engine must agree on what was sampled."""

    enabled: bool = True
    """Check before the first update."""
    max_k3: float = Field(0.01, gt=0)
    """Largest mean k3 between recomputed and recorded log-probs, nats."""
    max_extreme: float = Field(0.01, ge=0, le=1)
    """Largest share of tokens with a probability ratio beyond 2."""
    max_rescore: float = Field(1e-3, gt=0)
    """Largest |log-ratio| between two scorings with other micro-batches."""
