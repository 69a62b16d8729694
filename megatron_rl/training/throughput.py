"""Tokens per second and rank, and model FLOPs utilisation, per iteration."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.backend import platform
from megatron_rl.config import RunConfig
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.records import ScoredBatch


def active_parameters(hf: HFModelConfig) -> int:
    """Parameters one token passes through in a forward: embeddings left out, output layer counted, k of E experts."""
    attention = hf.hidden_size * hf.head_dim * 2 * (hf.num_heads + hf.num_kv_heads)
    expert = 3 * hf.hidden_size * hf.moe_ffn_size * hf.topk + hf.hidden_size * hf.num_experts
    dense = 3 * hf.hidden_size * hf.ffn_size
    mlp = len(hf.moe_layers) * expert + (hf.num_layers - len(hf.moe_layers)) * dense
    return hf.num_layers * attention + mlp + hf.hidden_size * hf.vocab_size


def throughput_metrics(
    config: RunConfig, models: ActorCritic, scored: ScoredBatch, seconds: dict[str, float]
) -> dict[str, float]:
    """`throughput/*`: tokens of the rollout batch over the seconds of each phase and rank, and MFU of the updates.

    MFU counts 6 FLOPs per active parameter and token of a training pass and 2 of a scoring pass (attention scores left
    out: an underestimate for long sequences), over the peak of `platform.peak_flops`.
    """
    tokens = scored.metrics.get("rollout/tokens", 0.0)
    world, algorithm = dist.get_world_size(), config.algorithm
    passes = {"actor": algorithm.epochs, "critic": algorithm.critic.epochs}
    update_seconds = sum(seconds.get(name, 0.0) for name in passes)
    if not update_seconds:
        return {}
    scoring = 2 * ((algorithm.anchor.name == "ewma") + algorithm.policy.needs_whole_step)
    flops = (
        active_parameters(models.actor.model.hf)
        * tokens
        * (
            6 * passes["critic"] * bool(seconds.get("critic"))
            + (6 + scoring) * passes["actor"] * bool(seconds.get("actor"))
        )
    )
    trained = tokens * sum(passes[name] for name in passes if seconds.get(name))
    return {
        "throughput/train_tokens_per_second_per_rank": trained / update_seconds / world,
        "throughput/rollout_tokens_per_second_per_rank": tokens / max(seconds.get("rollout", 0.0), 1e-9) / world,
        "throughput/mfu": flops / update_seconds / world / platform.peak_flops(config.model.dtype),
    }
