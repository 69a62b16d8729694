"""How a model's own routers choose experts where Megatron's top-k is another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.hf.architecture import Groups

Choice = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(scores float [t, E], k) → (the chosen scores [t, k], their experts int64 [t, k])."""


def group_limited(groups: Groups) -> Choice:
    """Top-k inside the best groups of experts (arXiv 2405.04434 §2.1.2; arXiv 2412.19437 §2.1.2).

    Megatron scores a group by its best k // chosen experts; models score it by their own number whatever k is.
    """

    def choose(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = scores.unflatten(1, (groups.count, -1))
        ranking = grouped.topk(groups.best, 2).values.sum(2)
        used = torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ranking.topk(groups.chosen, 1).indices, True)
        return torch.where(used[:, :, None], grouped, -torch.inf).flatten(1).topk(k, 1)

    return choose
