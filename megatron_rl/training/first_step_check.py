"""The step-0 gate: before the first update, the trainer must recognise what the engine sampled.

Two checks: recomputed log-probs against the recorded ones (mean k3, share of ratios beyond 2), and a second scoring
with other micro-batches, which must give the same log-probs. Out of bounds, the run stops and names the likely cause,
found by scoring again with one assumption changed at a time.
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_rl.algorithm.metrics import mismatch_metrics
from megatron_rl.algorithm.selection import trainable_rows
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import Agents
from megatron_rl.training.forward import decisions_of, policy_logprobs, streams

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
"""Tried in turn when log-probs do not fit; 1 also stands for log-probs of raw logits."""


def check_first_step(agents: Agents, batch: RolloutBatch) -> dict[str, float]:
    """Run the gate on a validated batch whose every token was sampled by the present weights.

    Returns:
        Metrics `gate/*`.

    Raises:
        ConfigError: a bound is exceeded; names the measured value, the bound and the likely cause.
    """
    bounds = agents.config.gate
    scored = _score(agents, batch)
    again = _score(agents, batch, budget=_other_budget(agents, batch))
    found = mismatch_metrics(scored[0], scored[1])
    rescore = float((scored[0] - again[0]).abs().max()) if len(scored[0]) else 0.0
    metrics = {f"gate/{name}": found[name] for name in ("k3", "extreme2", "largest")} | {"gate/rescore": rescore}
    if rescore > bounds.max_rescore:
        raise ConfigError(
            "two scorings of the same tokens with other micro-batches disagree",
            found=f"{rescore:.2e} nats",
            expected=f"at most {bounds.max_rescore:.0e}",
            setting="gate.max_rescore, after looking for dropout, batch-dependent kernels or routes tied to packing",
        )
    if found["k3"] > bounds.max_k3 or found["extreme2"] > bounds.max_extreme:
        raise ConfigError(
            f"the trainer does not recognise the sampled tokens; likely cause: {diagnose(agents, batch, found['k3'])}",
            found=f"mean k3 {found['k3']:.2e}, share of ratios beyond 2 {found['extreme2']:.2e}",
            expected=f"at most {bounds.max_k3:.0e} and {bounds.max_extreme:.0e}",
            setting="gate.max_k3, gate.max_extreme, or gate.enabled=false if the difference is meant",
        )
    return metrics


def diagnose(agents: Agents, batch: RolloutBatch, k3: float) -> str:
    """The assumption whose change brings log-probs closest to the recorded ones, in words."""
    configured = agents.config.rollout.temperature
    trials = {
        f"temperature (the recorded log-probs fit one of about {t:g}, the trainer divides logits by {configured:g})": {
            "temperature": t
        }
        for t in TEMPERATURES
        if t != configured
    }
    trials["recorded routes do not belong to these tokens or this model (native routing fits better)"] = {
        "replay": False
    }
    results = {cause: _k3(agents, batch, **change) for cause, change in trials.items()}
    best = min(results, key=results.get)
    if results[best] < 0.2 * k3:
        return best
    return "other weights than the engine's, another tokenisation, or log-probs shifted against their tokens"


def _k3(agents: Agents, batch: RolloutBatch, *, temperature: float | None = None, replay: bool | None = None) -> float:
    if temperature is not None:
        rollout = agents.config.rollout.model_copy(update={"temperature": temperature})
        agents = dataclasses.replace(agents, config=agents.config.model_copy(update={"rollout": rollout}))
    return mismatch_metrics(*_score(agents, batch, replay=replay))["k3"]


def _score(agents: Agents, batch: RolloutBatch, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(recomputed, recorded) log-probs of the decisions that may enter a loss."""
    actor, _ = streams(batch)
    rows = trainable_rows(batch)
    logprobs = policy_logprobs(agents, actor, batch, rows, **options)
    behaviour = torch.tensor(batch.logprobs[batch.action_mask], device=logprobs.device)
    decisions = torch.tensor(batch.action_mask.cumsum(), device=logprobs.device)
    offsets = torch.cat((decisions.new_zeros(1), decisions))[torch.as_tensor(batch.offsets, device=logprobs.device)]
    kept = decisions_of(offsets, rows)
    return logprobs[kept], behaviour[kept]


def _other_budget(agents: Agents, batch: RolloutBatch) -> int:
    longest = int(batch.lengths.max())
    return max(longest, agents.config.batching.token_budget // 2)
