"""An iteration that was stopped between two of its optimizer steps: what of it a checkpoint keeps.

The scored vectors (values, anchor and reference log-probs, advantages, returns) belong to the weights before the
iteration's first step; those weights are gone, so the vectors are saved. Tokens and routes are read again from the
recorded files.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend import platform
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.forward import streams
from megatron_rl.training.records import ScoredBatch

_REREAD = ("batch", "actor", "critic")
"""Fields of `ScoredBatch` that come from the recorded files."""


@dataclass(frozen=True)
class PartialIteration:
    """An iteration whose rollouts are scored, and the optimizer steps it has taken."""

    scored: ScoredBatch
    metrics: dict[str, float]
    """Metrics of the iteration so far, without those of its steps."""
    steps: list[dict[str, float]]
    """Metrics of the steps done."""

    def to_bytes(self) -> bytes:
        """Everything but what can be read again. Collective: a pipeline stage knows the expert counts of its own layers
        only."""
        state = {f.name: _portable(getattr(self.scored, f.name)) for f in fields(ScoredBatch)}
        state = {name: value for name, value in state.items() if name not in _REREAD}
        loads: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(loads, state["critic_load"])
        state["critic_load"] = {layer: count for load in loads for layer, count in load.items()}
        buffer = io.BytesIO()
        torch.save({"scored": state, "values": self.metrics, "steps": self.steps}, buffer)
        return buffer.getvalue()


def read_partial_iteration(path: Path, batch: RolloutBatch) -> PartialIteration:
    """Read what `to_bytes` made.

    Args:
        path: file in the checkpoint.
        batch: the iteration's rollouts, trajectories in the order they were scored in.
    """
    stored = torch.load(path, map_location=platform.device(), weights_only=True)
    actor, critic = streams(batch)
    state = stored["scored"] | {"rows": stored["scored"]["rows"].cpu().numpy()}
    scored = ScoredBatch(batch=batch, actor=actor, critic=critic, **state)
    return PartialIteration(scored, stored["values"], stored["steps"])


def _portable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return value
