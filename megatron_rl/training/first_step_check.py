"""The first-step check: before the first update, the trainer must recognise what the engine sampled.

Two checks: recomputed log-probs against the recorded ones (mean k3, share of ratios beyond 2), and a second scoring
with other micro-batches, which must give the same log-probs. Out of bounds, the run stops and names the likely cause,
found by scoring again with one assumption changed at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.algorithm.metrics import mismatch_metrics
from megatron_rl.algorithm.selection import trainable_rows
from megatron_rl.backend.step import Readout
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import decisions_of, policy_logprobs, streams

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
"""Tried in turn when log-probs do not fit; 1 also stands for log-probs of raw logits."""


def check_first_step(models: ActorCritic, batch: RolloutBatch) -> dict[str, float]:
    """Check a validated batch whose every token was sampled by the present weights.

    Returns:
        Metrics `first_step/*`.

    Raises:
        ConfigError: a bound is exceeded; names the measured value, the bound and the likely cause.
    """
    bounds = models.config.first_step_check
    logprobs, behaviour = _score(models, batch)
    rescored, _ = _score(models, batch, budget=_other_budget(models, batch))
    mismatch = mismatch_metrics(logprobs, behaviour)
    rescore = float((logprobs - rescored).abs().max()) if len(logprobs) else 0.0
    metrics = {f"first_step/{name}": mismatch[name] for name in ("k3", "extreme2", "largest")}
    metrics["first_step/rescore"] = rescore
    if rescore > bounds.max_rescore:
        raise ConfigError(
            "two scorings of the same tokens with other micro-batches disagree",
            found=f"{rescore:.2e} nats",
            expected=f"at most {bounds.max_rescore:.0e}",
            setting="first_step_check.max_rescore, after looking for dropout, batch-dependent kernels or routes tied "
            "to packing",
        )
    k3, extreme = mismatch["k3"], mismatch["extreme2"]
    if k3 > bounds.max_k3 or extreme > bounds.max_extreme:
        raise ConfigError(
            f"the trainer does not recognise the sampled tokens; likely cause: {diagnose(models, batch, k3)}",
            found=f"mean k3 {k3:.2e}, share of ratios beyond 2 {extreme:.2e}",
            expected=f"at most {bounds.max_k3:.0e} and {bounds.max_extreme:.0e}",
            setting="first_step_check.max_k3 or .max_extreme, or .enabled=false if the difference is meant",
        )
    return metrics


def diagnose(models: ActorCritic, batch: RolloutBatch, k3: float) -> str:
    """The assumption whose change brings log-probs closest to the recorded ones, in words. Collective.

    Args:
        k3: mean k3 between trainer and engine as configured, which an explanation must cut to a fifth.
    """
    configured, chunk = models.config.rollout.temperature, models.config.batching.logprob_chunk
    trials: dict[str, dict[str, Any]] = {
        f"temperature (the recorded log-probs fit one of about {t:g}, the trainer divides logits by {configured:g})": {
            "readout": Readout(t, chunk)
        }
        for t in TEMPERATURES
        if t != configured
    }
    trials["recorded routes do not belong to these tokens or this model (native routing fits better)"] = {
        "replay": False
    }
    results = {cause: mismatch_metrics(*_score(models, batch, **change))["k3"] for cause, change in trials.items()}
    best = min(results, key=results.__getitem__)
    if results[best] < 0.2 * k3:
        return best
    return "other weights than the engine's, another tokenisation, or log-probs shifted against their tokens"


def _score(models: ActorCritic, batch: RolloutBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(recomputed, recorded) log-probs of the decisions that may enter a loss; `options` of `policy_logprobs`."""
    actor, _ = streams(batch)
    rows = trainable_rows(batch)
    logprobs = policy_logprobs(models, actor, batch, rows, **options)
    behaviour = torch.tensor(batch.logprobs[batch.action_mask], device=logprobs.device)
    decisions = torch.tensor(batch.action_mask.cumsum(), device=logprobs.device)
    offsets = torch.cat((decisions.new_zeros(1), decisions))[torch.as_tensor(batch.offsets, device=logprobs.device)]
    kept = decisions_of(offsets, rows)
    return logprobs[kept], behaviour[kept]


def _other_budget(models: ActorCritic, batch: RolloutBatch) -> int:
    longest = int(batch.lengths.max())
    return max(longest, models.config.batching.token_budget // 2)
