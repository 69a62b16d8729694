"""Supervised cold start on demonstrations: −log π of action tokens, or of every token.

On random play neither says which action is good. Action tokens teach how an action is spelled; all tokens also teach
what the environment answers, which the policy can build on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_rl.backend import platform
from megatron_rl.backend.step import train
from megatron_rl.batching import actor_stream, decision_offsets, split_minibatches
from megatron_rl.engines.episodes import Demonstration
from megatron_rl.reduce import from_last, sum_over
from megatron_rl.training.agents import Agents
from megatron_rl.training.objective.losses import LikelihoodTerms, loss_weights
from megatron_rl.training.score import decisions_of, plan, prepare, readout


def learn_demonstrations(
    agents: Agents,
    demonstrations: list[Demonstration],
    *,
    epochs: int,
    minibatches: int,
    observations: bool = False,
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Train the actor on demonstrations; the critic is left alone.

    Args:
        demonstrations: the same on every rank.
        epochs, minibatches: passes, and optimizer steps in each.
        observations: learn to predict observation tokens too.
        on_step: called with the loss of each step, nats per action token.
    """
    offsets = np.concatenate([[0], np.cumsum([len(d.tokens) for d in demonstrations])])
    tokens = np.concatenate([d.tokens for d in demonstrations])
    mask = np.concatenate([d.action_mask for d in demonstrations])
    if observations:
        mask = np.ones(len(tokens), bool)
        mask[offsets[:-1]] = False
    stream, device = actor_stream(tokens, offsets, mask), platform.device()
    decisions = torch.as_tensor(decision_offsets(mask, offsets), device=device)
    prompts = torch.arange(len(demonstrations), device=device)
    for epoch in range(epochs):
        for rows in split_minibatches(len(demonstrations), minibatches, agents.config.seed, epoch):
            weights = loss_weights("token_mean", decisions, decisions_of(decisions, rows), prompts)
            planned = plan(agents, stream, rows)
            parts = prepare(agents, agents.actor.model, stream, None, planned, rows, replay=False)
            sums = train(agents.actor.model, parts, planned.length, readout(agents.config), LikelihoodTerms(weights))
            total = torch.zeros(1, dtype=torch.float64, device=device) if sums is None else sums.clone()
            if sums is not None:
                sum_over(total, agents.topology.dp_cp_group)
            agents.actor.step()
            on_step(float(from_last(total, agents.topology.pp_group)))
