"""What the trainer says of the weights it publishes: log-probs of one recorded sequence, for engines to compare."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_rl.batching import actor_stream
from megatron_rl.engines.canary import Canary
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import select_rows
from megatron_rl.training.agents import Agents
from megatron_rl.training.score import policy_logprobs

LONGEST = 1024
"""Tokens; longer sequences are taken only where no other has two tokens."""


def make_canary(agents: Agents, batch: RolloutBatch) -> Canary | None:
    """Score one sequence of a batch under the live weights, at temperature 1, routed natively. Collective.

    Args:
        agents: the live parts; unchanged.
        batch: recorded rollouts, the same on every rank.

    Returns:
        None where no sequence has two tokens.
    """
    row = _choose(batch.lengths)
    if row is None:
        return None
    chosen = select_rows(batch, [row])
    predicted = np.arange(len(chosen.tokens)) > 0
    stream = actor_stream(chosen.tokens, chosen.offsets, predicted)
    logprobs = policy_logprobs(_at_temperature_one(agents), stream, chosen, np.zeros(1, np.int64), replay=False)
    return Canary(np.asarray(chosen.tokens), np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()]))


def _choose(lengths: np.ndarray) -> int | None:
    """The longest sequence of at most LONGEST tokens, else the shortest."""
    fitting = np.flatnonzero((lengths >= 2) & (lengths <= LONGEST))
    if len(fitting):
        return int(fitting[lengths[fitting].argmax()])
    longer = np.flatnonzero(lengths >= 2)
    return int(longer[lengths[longer].argmin()]) if len(longer) else None


def _at_temperature_one(agents: Agents) -> Agents:
    rollout = agents.config.rollout.model_copy(update={"temperature": 1.0})
    return dataclasses.replace(agents, config=agents.config.model_copy(update={"rollout": rollout}))
