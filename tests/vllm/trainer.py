"""The trainer's side of a comparison, run in a rank process of its own; imports Megatron only there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.engines import Generation
from megatron_rl.engines.canary import Canary
from megatron_rl.rollouts.schema import RolloutHeader, Trajectory
from megatron_rl.rollouts.store import write_shard


@dataclass(frozen=True)
class Scores:
    """What one rank of the real trainer says of recorded sequences."""

    native: np.ndarray
    """float32 [D]: log-probs where every router chooses for itself."""
    replayed: np.ndarray
    """float32 [D]: log-probs under the recorded routes."""
    routes: list[np.ndarray]
    """B native routes [L, N-1, k]."""


def record(header: RolloutHeader, prompts: list[list[int]], generations: list[Generation], directory: Path) -> Path:
    """Write single-turn trajectories as the run would."""
    pairs = zip(prompts, generations, strict=True)
    write_shard(directory, header, [_trajectory(row, *pair) for row, pair in enumerate(pairs)], name="rank-00000")
    return directory


def score_recorded(checkpoint: str, directory: str, dtype: str, temperature: float) -> Scores:
    """Read the recorded shard back and score it with the real model."""
    from megatron_rl.rollouts.store import read_batch
    from tests.dist.experiment import read, record_live

    models, batch = _agents(checkpoint, dtype, temperature), read_batch(Path(directory))
    native, routes = record_live(models, batch)
    replayed = read(models, models.actor, _stream(batch), batch, np.arange(len(batch)), replay=True)[0]
    return Scores(native, replayed.numpy(), routes)


def canary(checkpoint: str, tokens: list[int]) -> Canary:
    """The trainer's canary for a checkpoint: log-probs of fixed tokens at temperature 1, in float32."""
    from megatron_rl.batching import actor_stream
    from megatron_rl.training.forward import policy_logprobs

    models = _agents(checkpoint, "float32", 1.0)
    ids, n = np.asarray(tokens, np.int32), len(tokens)
    stream = actor_stream(ids, np.array([0, n]), np.arange(n) > 0)
    logprobs = policy_logprobs(models, stream, None, np.zeros(1, np.int64), replay=False)
    return Canary(ids, np.concatenate([[0.0], logprobs.numpy()]).astype(np.float32))


def _agents(checkpoint: str, dtype: str, temperature: float):
    from megatron_rl.backend.topology import initialize
    from megatron_rl.config import parse_config
    from megatron_rl.training.actor_critic import build_actor_critic

    config = parse_config(
        dict(model=dict(path=checkpoint, dtype=dtype), rollout=dict(temperature=temperature), replay=dict(enabled=True))
    )
    return build_actor_critic(config, initialize(config.parallel, seed=1))


def _stream(batch):
    from megatron_rl.training.forward import streams

    return streams(batch)[0]


def _trajectory(row: int, prompt: list[int], generation: Generation) -> Trajectory:
    n, sampled = len(prompt), len(generation.tokens)
    mask = np.arange(n + sampled) >= n
    behaviour = np.concatenate([np.zeros(n, np.float32), generation.logprobs])
    return Trajectory(
        trajectory_id=f"t{row}",
        prompt_id=f"p{row}",
        group_id=f"g{row}",
        tokens=np.concatenate([np.asarray(prompt, np.int32), generation.tokens]),
        action_mask=mask,
        turn_id=np.where(mask, 0, -1).astype(np.int16),
        logprobs=behaviour,
        version=np.where(mask, generation.version, 0).astype(np.int32),
        turn_rewards=np.zeros(1, np.float32),
        reward=0.0,
        outcome="completed",
        terminated=True,
        truncated=False,
        routes=generation.routes,
    )
