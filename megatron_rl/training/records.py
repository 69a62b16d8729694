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
    """int64: trajectories that may enter a loss: at least one decision, outcome not excluded, group not dropped."""
    offsets: torch.Tensor
    """int64 [B+1]: decisions of trajectory b are [offsets[b], offsets[b+1])."""
    turn_offsets: torch.Tensor
    """int64 [K+1]: decisions of turn k are [turn_offsets[k], turn_offsets[k+1])."""
    prompts: torch.Tensor
    """int64 [B]: number of each trajectory's prompt."""
    groups: torch.Tensor
    """int64 [B]: number of each trajectory's group."""
    kept: torch.Tensor
    """bool [D]: decisions of the policy loss, after every removal that is known before the update."""
    value_kept: torch.Tensor
    """bool [D]: decisions of the value loss; under a turn critic the first one of each turn."""
    correct: torch.Tensor | None
    """bool [B]: solved trajectories, where the objective asks for them."""
    behaviour: torch.Tensor
    """[D] log μ, nats."""
    versions: torch.Tensor
    """int64 [D]: weight version that sampled each decision."""
    anchor: torch.Tensor | None
    """[D] log π_old where it is recomputed once; None under an EWMA or behaviour anchor."""
    reference: torch.Tensor | None
    """[D] log π_ref, or None."""
    values: torch.Tensor | None
    """[D] V of the critic before the update; None without a critic."""
    advantages: torch.Tensor
    """[D], whitened where configured."""
    returns: torch.Tensor | None
    """[D] critic targets; None without a critic."""
    critic_load: dict[int, torch.Tensor]
    """0-based decoder layer → float64 [E]: experts the critic chose natively, for its load-balancing loss."""
    actor_steps: int
    """Completed steps of the actor when this was scored: while they stay, `anchor` is also log π_θ."""
    metrics: dict[str, float]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: decisions of each trajectory."""
        return self.offsets.diff()
