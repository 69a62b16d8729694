"""What each advantage estimator and each policy loss needs and goes with: the facts that refusals and defaults use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Clock = Literal["decision", "turn", "sequence", "group"]

CRITIC_ADVANTAGES = frozenset({"gae", "turn_gae", "evpo"})
"""Estimators that read a critic; the others build none."""
GROUP_ADVANTAGES = frozenset({"grpo", "dr_grpo", "rloo", "vpo"})
"""Estimators that compare responses of one group."""
SEQUENCE_ADVANTAGES = GROUP_ADVANTAGES | {"batch_mean"}
"""Estimators with one advantage for a whole sequence."""
ANY_ADVANTAGE = CRITIC_ADVANTAGES | SEQUENCE_ADVANTAGES
EACH_SEQUENCE_EQUAL = frozenset({"sequence_mean", "prompt_mean"})
"""Aggregations under which a loss copied to a sequence's decisions counts once."""
ANY_AGGREGATION = EACH_SEQUENCE_EQUAL | {"token_mean", "sequence_sum_mean", "constant"}


@dataclass(frozen=True)
class Method:
    """One policy loss."""

    clock: Clock
    """What has one loss: a decision, a turn, a sequence, or a whole group of sequences."""
    clip: tuple[float, float] | None = None
    """The paper's ε_l, ε_h; None: the loss has no such bounds, or the paper gives none."""
    advantages: frozenset[str] = ANY_ADVANTAGE
    """Estimators whose advantages have the loss's clock."""
    anchors: frozenset[str] = frozenset({"recompute", "behaviour", "ewma"})
    """Proximal policies it has a use for."""
    aggregations: frozenset[str] = ANY_AGGREGATION
    dual_clip: bool = False
    """Whether a loss at a negative advantage is unbounded, so that dual clip has something to bound."""
    importance: bool = True
    """Whether ω = π_anchor/μ may multiply it; False where the loss corrects by itself or has no sampler."""
    bias_correction: bool = False
    """Whether the update is divided by max(1, ‖C‖) of clipping-bias correction."""

    @property
    def needs_whole_step(self) -> bool:
        """Whether its gradient is formed on the whole step's log-probs: terms of several decisions, or ‖C‖."""
        return self.clock != "decision" or self.bias_correction


_NO_EWMA = frozenset({"recompute", "behaviour"})

METHODS: dict[str, Method] = {
    "ppo_clip": Method("decision", (0.2, 0.2), dual_clip=True),
    "reinforce": Method("decision", anchors=_NO_EWMA),
    "gspo": Method("sequence", (3e-4, 4e-4), SEQUENCE_ADVANTAGES, aggregations=EACH_SEQUENCE_EQUAL, dual_clip=True),
    "gspo_token": Method("sequence", (3e-4, 4e-4), aggregations=EACH_SEQUENCE_EQUAL, dual_clip=True),
    "gmpo": Method("sequence", None, SEQUENCE_ADVANTAGES, aggregations=EACH_SEQUENCE_EQUAL),
    "cispo": Method("decision"),
    "sapo": Method("decision"),
    "dis": Method("decision", (0.3, 5.0), anchors=frozenset({"behaviour"}), importance=False),
    "turn_ppo": Method("turn", (0.2, 0.2), SEQUENCE_ADVANTAGES | {"turn_gae"}, dual_clip=True),
    "turn_is": Method("turn", (0.2, 0.2), dual_clip=True),
    "st_ppo": Method("turn", (0.2, 0.2), bias_correction=True),
    "s_ppo": Method("decision", (0.2, 0.2), bias_correction=True),
    "drpo": Method(
        "group", None, frozenset({"none"}), _NO_EWMA, aggregations=frozenset({"prompt_mean"}), importance=False
    ),
}
