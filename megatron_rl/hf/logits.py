"""What transformers makes of a checkpoint: the reference a converted model is compared with.

Only a comparison of outputs sees faults that a round trip undoes: gate and up exchanged in a table, a square matrix
transposed, another rotary base in the built model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_rl.errors import CheckpointError


@dataclass(frozen=True)
class LogitsReport:
    """Largest differences of a model from transformers on the same tokens."""

    logprob: float
    """Of the log-prob of a next token, nats."""
    entropy: float
    """Of the entropy of a next token, nats."""
    sequence: int
    """Where the largest difference of log-probs lies."""
    position: int

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.logprob, self.entropy)

    def raise_above(self, bound: float, file: object = None) -> None:
        """Raise CheckpointError where a difference exceeds `bound` nats."""
        if not self.worst <= bound:
            raise CheckpointError(
                "the model differs from transformers",
                file=file,
                field=f"sequence {self.sequence}, token {self.position}",
                found=f"log-probs {self.logprob:.1e}, entropies {self.entropy:.1e} apart",
                expected=f"at most {bound:.1e} nats",
            )


@torch.no_grad()
def transformers_readings(path: str | Path, tokens: np.ndarray) -> torch.Tensor:
    """Log-prob of each token given those before it, and entropy there, by transformers in float32 on the CPU.

    Args:
        path: checkpoint directory; the whole model is loaded.
        tokens: int [B, N].

    Returns:
        float32 [2, B, N - 1], nats.
    """
    from transformers import AutoModelForCausalLM

    # Fused kernels round otherwise, and the grouped one refuses some widths.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain).eval()
    ids = torch.as_tensor(tokens.astype(np.int64))
    logp = model(ids).logits[:, :-1].log_softmax(-1)
    return torch.stack((logp.gather(2, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)))


def compare_logits(readings: torch.Tensor, path: str | Path, tokens: np.ndarray) -> LogitsReport:
    """Compare a model's readings with transformers' of the checkpoint it was made from.

    Args:
        readings: float32 [2, B, N - 1] of `backend.probe.next_token_readings` (or an engine's), from float32 weights.
        path: the checkpoint.
        tokens: int [B, N], those the readings are of.
    """
    difference = (readings.cpu() - transformers_readings(path, tokens)).abs().nan_to_num(nan=torch.inf)
    place = int(difference[0].argmax())
    sequence, position = divmod(place, difference.shape[2])
    return LogitsReport(float(difference[0].max()), float(difference[1].max()), sequence, position + 1)
