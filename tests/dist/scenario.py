"""The one fixed experiment that every layout must repeat: checkpoints, a recorded batch, an objective, and a layout.

π_θ, π_old (the EWMA anchor), μ and π_ref are four different policies, and the critic is not the one whose values were
recorded, so that no ratio is 1 and every clip is reached. Nothing here needs a process group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.config import RunConfig, parse_config
from megatron_rl.engines.tiny import TinyShape
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, RolloutHeader, SamplingTruth

VOCAB = 61
SHAPE = TinyShape(hidden_size=48, moe_hidden_size=32, max_positions=128)
LENGTHS = (13, 7, 21, 5, 9, 11, 16, 6)
"""Raw tokens of each trajectory."""
EMPTY_ROW, TRUNCATED_ROW, MISSING_ROW = 3, 1, 4
"""Trajectories without a decision, with a boundary, and with a route row that was not recorded."""
SECOND_STEP = (1, 4, 7)
"""Trajectories of the second optimizer step: fewer than four data ranks."""
TEMPERATURE = 0.8

ALGORITHM = dict(
    anchor="ewma",
    gamma=0.97,
    estimator=dict(name="gae", lam_actor=0.9, lam_critic=0.95),
    policy=dict(name="ppo_clip", clip_low=0.2, clip_high=0.25, dual_clip=1.3),
    value=dict(clip=0.2),
    importance=dict(name="sequence", cap=1.4),
    reference_kl=dict(name="loss", coef=0.1),
    entropy_coef=0.01,
    router_losses=dict(aux_coef=0.02, z_coef=0.003),
    aggregation="sequence_mean",
)
OPTIMIZER = dict(lr=2e-3, eps=1e-3, weight_decay=0.01, clip_grad=0.5)


@dataclass(frozen=True)
class Layout:
    """One way to compute the experiment."""

    name: str
    world: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `parallel` in the configuration."""
    budget: int = 256
    packed: bool = True
    shuffled: bool = False
    dtype: str = "float32"
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of ALGORITHM."""
    replay: bool = True


@dataclass(frozen=True)
class Scenario:
    """Files and data of the experiment. Checkpoints by part: reference, anchor, actor, old_critic, critic."""

    checkpoints: Mapping[str, str]
    batch: RolloutBatch

    def config(self, layout: Layout) -> RunConfig:
        """The run configuration under a layout."""
        return parse_config(
            dict(
                model=dict(
                    path=self.checkpoints["reference"],
                    critic_path=self.checkpoints["old_critic"],
                    dtype=layout.dtype,
                    vocab_multiple=8,
                ),
                parallel=dict(layout.parallel),
                batching=dict(token_budget=layout.budget, packed=layout.packed, logprob_chunk=7),
                optimizer=OPTIMIZER,
                critic_optimizer=OPTIMIZER,
                algorithm=ALGORITHM | dict(layout.algorithm),
                rollout=dict(temperature=TEMPERATURE),
                replay=dict(enabled=layout.replay),
            )
        )


def weight_shapes(shape: TinyShape, head: str) -> dict[str, tuple[int, ...]]:
    """HF names on disk and shapes; `head` is `lm` or `value`."""
    h, d, ffn = shape.hidden_size, shape.head_dim, shape.moe_hidden_size
    query, key = shape.num_heads * d, shape.num_kv_heads * d
    shapes = {"model.embed_tokens.weight": (VOCAB, h), "model.norm.weight": (h,)}
    shapes |= {"lm_head.weight": (VOCAB, h)} if head == "lm" else {"score.weight": (1, h)}
    for layer in range(shape.num_layers):
        parts = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        parts |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
        parts |= {"self_attn.q_proj": (query, h), "self_attn.k_proj": (key, h), "self_attn.v_proj": (key, h)}
        parts |= {"self_attn.o_proj": (h, query)}
        if layer in shape.dense_layers:
            parts |= _gated("mlp", h, 2 * h)
        else:
            parts |= {"mlp.gate": (shape.num_experts, h)}
            for expert in range(shape.num_experts):
                parts |= _gated(f"mlp.experts.{expert}", h, ffn)
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return shapes


def _gated(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{n}": (hidden, ffn) if n == "down_proj" else (ffn, hidden) for n in _GATED}


_GATED = ("gate_proj", "up_proj", "down_proj")


def draw_weights(shape: TinyShape, head: str, seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights large enough that logits, gates and values spread."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if len(size) == 1 else 0.0) + 0.1 * torch.randn(size, generator=generator)
        for name, size in weight_shapes(shape, head).items()
    }


def perturbed(weights: Mapping[str, torch.Tensor], scale: float, seed: int) -> dict[str, torch.Tensor]:
    """The weights plus normal noise of this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + scale * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def write_checkpoint(path: Path, shape: TinyShape, weights: Mapping[str, torch.Tensor], **settings: Any) -> str:
    """An HF checkpoint directory; `settings` override entries of config.json. Returns its path."""
    path.mkdir(parents=True)
    config = shape.hf_config(VOCAB).to_dict() | settings
    head = "TokenClassification" if "score.weight" in weights else "CausalLM"
    (path / "config.json").write_text(json.dumps(config | {"architectures": [f"Qwen3MoeFor{head}"]}))
    save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def write_checkpoints(folder: Path, seed: int, shape: TinyShape = SHAPE, **settings: Any) -> dict[str, str]:
    """The five checkpoints of a scenario."""
    reference, critic = draw_weights(shape, "lm", seed), draw_weights(shape, "value", seed + 1)
    anchor = perturbed(reference, 0.02, seed + 2)
    parts = {
        "reference": reference,
        "anchor": anchor,
        "actor": perturbed(anchor, 0.012, seed + 3),
        "old_critic": critic,
        "critic": perturbed(critic, 0.012, seed + 4),
    }
    return {name: write_checkpoint(folder / name, shape, weights, **settings) for name, weights in parts.items()}


def recorded_batch(seed: int, shape: TinyShape = SHAPE) -> RolloutBatch:
    """Trajectories of several turns with observations between; log-probs and routes are placeholders."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    mask, turn = np.zeros(offsets[-1], bool), np.full(offsets[-1], -1, np.int16)
    turns = []
    for row, (start, length) in enumerate(zip(offsets, LENGTHS, strict=False)):
        spans = [] if row == EMPTY_ROW else [(p, min(p + 3, length)) for p in range(2, length, 4)]
        for number, (first, stop) in enumerate(spans):
            mask[start + first : start + stop], turn[start + first : start + stop] = True, number
        turns.append(len(spans))
    layers = shape.num_layers - len(shape.dense_layers)
    moe = tuple(i for i in range(shape.num_layers) if i not in shape.dense_layers)
    rows = range(len(LENGTHS))
    truncated = np.array([row == TRUNCATED_ROW for row in rows])
    return RolloutBatch(
        header=RolloutHeader(
            ModelFingerprint("qwen3_moe", VOCAB, shape.num_experts, shape.topk, moe, "none"),
            SamplingTruth(temperature=TEMPERATURE),
            "none",
        ),
        trajectory_ids=tuple(f"t{row}" for row in rows),
        prompt_ids=tuple(f"p{row % 3}" for row in rows),
        group_ids=tuple(f"g{row % 3}" for row in rows),
        offsets=offsets,
        tokens=rng.integers(0, VOCAB, offsets[-1]).astype(np.int32),
        action_mask=mask,
        turn_id=turn,
        logprobs=np.where(mask, -1, 0).astype(np.float32),
        version=(np.arange(offsets[-1]) // 5 % 4).astype(np.int32),
        turn_offsets=np.concatenate([[0], np.cumsum(turns)]),
        turn_rewards=rng.normal(size=sum(turns)).astype(np.float32),
        reward=rng.normal(size=len(LENGTHS)).astype(np.float32),
        outcome=tuple("truncated_length" if row == TRUNCATED_ROW else "completed" for row in rows),
        terminated=~truncated,
        truncated=truncated,
        boundary_offsets=np.array([0] * (TRUNCATED_ROW + 1) + [3] * (len(LENGTHS) - TRUNCATED_ROW)),
        boundary_tokens=np.array([5, 6, 7], np.int32),
        boundary_known=np.ones(len(LENGTHS), bool),
        routes=tuple(spread_routes(rng, layers, length - 1, shape) for length in LENGTHS),
        sources=tuple(("memory", row) for row in rows),
        metadata=tuple({"success": row % 2 == 0} for row in rows),
    )


def spread_routes(rng: np.random.Generator, layers: int, tokens: int, shape: TinyShape = SHAPE) -> np.ndarray:
    """uint8 [layers, tokens, k] of distinct random ids."""
    ranks = rng.random((layers, tokens, shape.num_experts)).argsort(-1)
    return ranks[..., : shape.topk].astype(np.uint8)


def with_recording(batch: RolloutBatch, logprobs: np.ndarray, routes: list[np.ndarray], seed: int) -> RolloutBatch:
    """The batch as a sampler near `logprobs` (float [D]) would have recorded it, one route row missing in one layer."""
    noise = np.random.default_rng(seed).normal(0, 0.12, len(logprobs))
    behaviour = np.zeros_like(batch.logprobs)
    behaviour[batch.action_mask] = np.minimum(logprobs + noise, -1e-3)
    routes = [ids.copy() for ids in routes]
    routes[MISSING_ROW][1, 3] = np.iinfo(routes[0].dtype).max
    return replace(batch, logprobs=behaviour, routes=tuple(routes))


def complete_routes(batch: RolloutBatch) -> RolloutBatch:
    """The batch with its missing row filled in."""
    routes = [ids.copy() for ids in batch.routes]
    routes[MISSING_ROW][1, 3] = routes[MISSING_ROW][1, 2]
    return replace(batch, routes=tuple(routes))


def shuffle_order(rows: int) -> np.ndarray:
    """A fixed permutation: position → original row."""
    return np.random.default_rng(7).permutation(rows)


def reordered(batch: RolloutBatch, order: np.ndarray) -> RolloutBatch:
    """The batch with trajectory `order[i]` at row i."""
    tokens, offsets = _ragged(batch.offsets, order)
    turns, turn_offsets = _ragged(batch.turn_offsets, order)
    boundary, boundary_offsets = _ragged(batch.boundary_offsets, order)
    by_token = {n: getattr(batch, n)[tokens] for n in ("tokens", "action_mask", "turn_id", "logprobs", "version")}
    by_row = {n: getattr(batch, n)[order] for n in ("reward", "terminated", "truncated", "boundary_known")}
    tuples = ("trajectory_ids", "prompt_ids", "group_ids", "outcome", "routes", "sources", "metadata")
    return replace(
        batch,
        offsets=offsets,
        turn_offsets=turn_offsets,
        boundary_offsets=boundary_offsets,
        turn_rewards=batch.turn_rewards[turns],
        boundary_tokens=batch.boundary_tokens[boundary],
        **by_token,
        **by_row,
        **{n: tuple(getattr(batch, n)[i] for i in order) for n in tuples},
    )


def decision_order(batch: RolloutBatch, order: np.ndarray) -> np.ndarray:
    """int64 [D]: for each decision of the reordered batch, its number in the original one."""
    counts = np.concatenate([[0], np.cumsum(batch.action_mask)])[batch.offsets]
    return _ragged(counts, order)[0]


def _ragged(offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.arange(offsets[i], offsets[i + 1]) for i in order]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])
