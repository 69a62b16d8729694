"""Numbers that a run steers by what it sees: β_KL, and the end of the critic's warm-up. They are in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config import AlgorithmConfig
from megatron_rl.objectives.divergence import adaptive_kl_coefficient
from megatron_rl.objectives.value import stopped_rising


@dataclass
class Controllers:
    """State of every controller of a run, the same on all ranks."""

    algorithm: AlgorithmConfig
    kl_coef: float = field(init=False)
    """β_KL now, of the KL loss or of KL shaping, whichever is on."""
    explained: list[float] = field(default_factory=list)
    """Explained variance of each iteration of value pretraining."""
    warmed_up: bool = False
    """Whether the warm-up ended early."""

    def __post_init__(self) -> None:
        self.kl_coef = self.algorithm.kl.coef if self.algorithm.kl else 0.0

    def critic_only(self, iteration: int) -> bool:
        """Whether only the critic learns in this iteration."""
        return iteration < self.algorithm.critic_warmup and not self.warmed_up

    def monte_carlo(self, iteration: int) -> bool:
        """Whether the critic learns Monte-Carlo returns in this iteration (value pretraining, VC-PPO 2503.01491)."""
        warmup = self.algorithm.critic.warmup
        return warmup is not None and warmup.patience is not None and self.critic_only(iteration)

    def observe(self, iteration: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Correct everything after an iteration that reported `metrics`; returns what is worth logging."""
        shown = {}
        if self.monte_carlo(iteration):
            self._watch_critic(metrics.get("critic/explained_variance", 0.0))
            shown["critic/warmed_up"] = float(self.warmed_up)
        if kl := self.algorithm.kl:
            shown["policy/kl_coef"] = self.kl_coef
            if kl.target is not None and "policy/kl_to_reference" in metrics:
                observed = metrics["policy/kl_to_reference"]
                self.kl_coef = adaptive_kl_coefficient(self.kl_coef, observed, kl.target, kl.gain)
        return shown

    def _watch_critic(self, explained: float) -> None:
        self.explained.append(explained)
        warmup = self.algorithm.critic.warmup
        assert warmup is not None and warmup.patience is not None
        self.warmed_up = stopped_rising(self.explained, warmup.patience, warmup.gain)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        return {"kl_coef": self.kl_coef, "explained": list(self.explained), "warmed_up": self.warmed_up}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. A β_KL that nothing steers is the configuration's, also where it was changed."""
        if self.algorithm.kl and self.algorithm.kl.target is not None:
            self.kl_coef = state["kl_coef"]
        self.explained, self.warmed_up = list(state["explained"]), state["warmed_up"]
