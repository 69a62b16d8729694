"""What the score pass adds to a rollout batch. Decision vectors [D] are float32 on the device, the same on every
rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.batching import TokenStream
from megatron_rl.rollouts.schema import RolloutBatch


@dataclass(frozen=True)
class ScoredBatch:
    """Written by `score.score_batch`, read by `update`."""

    batch: RolloutBatch
    actor: TokenStream
    critic: TokenStream
    rows: np.ndarray
    """int64: trajectories that may enter a loss: at least one decision, outcome not excluded."""
    offsets: torch.Tensor
    """int64 [B+1]: decisions of trajectory b are [offsets[b], offsets[b+1])."""
    behaviour: torch.Tensor
    """[D] log μ, nats."""
    versions: torch.Tensor
    """int64 [D]: weight version that sampled each decision."""
    anchor: torch.Tensor | None
    """[D] log π_old where it is recomputed once; None under an EWMA or behaviour anchor."""
    reference: torch.Tensor | None
    """[D] log π_ref, or None."""
    values: torch.Tensor
    """[D] V of the critic before the update."""
    advantages: torch.Tensor
    """[D], whitened where configured."""
    returns: torch.Tensor
    """[D] critic targets."""
    critic_load: dict[int, torch.Tensor]
    """0-based decoder layer → float64 [E]: experts the critic chose natively, for its load-balancing loss."""
    metrics: dict[str, float]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: decisions of each trajectory."""
        return self.offsets.diff()
