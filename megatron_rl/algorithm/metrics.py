"""What a scored batch tells about the run: rewards, outcomes, staleness, and whether responses depend on prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from megatron_rl.algorithm.selection import integer_ids, total_rewards
from megatron_rl.batching import TokenStream, actor_stream, decision_offsets
from megatron_rl.objectives.diagnostics import mismatch, pearson, prompt_information, staleness_histogram
from megatron_rl.objectives.importance import ratio, staleness
from megatron_rl.rollouts.schema import RolloutBatch

OLDEST = 4
"""Weight versions of staleness that have a bin of their own; the last holds everything older."""


def mismatch_metrics(logprobs: torch.Tensor, behaviour: torch.Tensor) -> dict[str, float]:
    """Trainer against engine on the decisions both scored: mean k1 and k3, share of ratios beyond 2 and 5, largest."""
    found = mismatch(logprobs, behaviour)
    means = {name: _ratio(getattr(found, name)) for name in ("k1", "k3", "extreme2", "extreme5")}
    return means | {"largest": float(found.largest), "pearson": float(pearson(found.probabilities))}


def _ratio(sums: torch.Tensor) -> float:
    return float(sums[0] / sums[1]) if sums[1] != 0 else float("nan")


def batch_metrics(batch: RolloutBatch, rows: np.ndarray) -> dict[str, float]:
    """`rollout/*` of the trajectories in play: rewards, lengths, ends."""
    if not len(rows):
        return {"rollout/trajectories": 0.0}
    totals = [
        float(batch.reward[b]) + float(batch.turn_rewards[batch.turn_offsets[b] : batch.turn_offsets[b + 1]].sum())
        for b in rows
    ]
    lengths = np.diff(batch.offsets)[rows]
    return {
        "rollout/trajectories": float(len(rows)),
        "rollout/reward_mean": float(np.mean(totals)),
        "rollout/reward_std": float(np.std(totals)),
        "rollout/reward_std_within_group": _spread_within(batch, rows),
        "rollout/tokens_mean": float(lengths.mean()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/turns_mean": float(np.diff(batch.turn_offsets)[rows].mean()),
        "rollout/truncated": float(np.asarray(batch.truncated)[rows].mean()),
        "rollout/success": float(np.mean([bool(batch.metadata[b].get("success", False)) for b in rows]))
        if batch.metadata
        else float("nan"),
    } | _outcomes(batch)


def _spread_within(batch: RolloutBatch, rows: np.ndarray) -> float:
    """Root of the mean over trajectories of the variance within their group."""
    return float(np.sqrt(np.mean(_residuals(batch, rows) ** 2)))


def _residuals(batch: RolloutBatch, rows: np.ndarray) -> np.ndarray:
    """Reward minus the mean reward of the trajectory's group, float64."""
    rewards, ids = (
        total_rewards(batch)[rows],
        np.unique(integer_ids(batch.group_ids).numpy()[rows], return_inverse=True)[1],
    )
    return rewards - (np.bincount(ids, rewards) / np.bincount(ids))[ids]


def _outcomes(batch: RolloutBatch) -> dict[str, float]:
    """Share of each outcome that occurred, over all trajectories, and the success within it where it is recorded."""
    found = Counter(batch.outcome)
    shares = {f"outcome/{name}": n / len(batch) for name, n in sorted(found.items())}
    if not batch.metadata:
        return shares
    solved = Counter(
        outcome for outcome, entry in zip(batch.outcome, batch.metadata, strict=True) if entry.get("success")
    )
    return shares | {f"success/{name}": solved[name] / n for name, n in sorted(found.items())}


def prompt_mean_baseline(batch: RolloutBatch, rows: np.ndarray) -> dict[str, float]:
    """Share of the reward's variance that the mean of the trajectory's group explains: what a critic must beat."""
    spread = float(np.var(total_rewards(batch)[rows])) if len(rows) else 0.0
    within = float(np.mean(_residuals(batch, rows) ** 2)) if len(rows) else 0.0
    return {"critic/explained_variance_of_group_mean": 1.0 - within / spread if spread > 0 else 0.0}


def staleness_metrics(
    versions: torch.Tensor, train_version: int, kept: torch.Tensor | None = None,
    *, prefix: str = "staleness/", share: str = "staleness/", oldest: int | None = OLDEST,
) -> dict[str, float]:  # fmt: skip
    """Mean age of decisions, in weight versions between sampling and training, and the share of each age.

    Args:
        versions: int [D], weight versions that sampled.
        train_version: weight version that trains.
        kept: bool [D], decisions that count; None: all.
        prefix, share: before `mean`, and before each age, in the names of the metrics.
        oldest: age whose share holds everything older; None: ages up to the greatest.

    Returns:
        Nothing where no decision counts.
    """
    ages = staleness(versions if kept is None else versions[kept], train_version)
    if not len(ages):
        return {}
    last = max(int(ages.max()), 0) if oldest is None else oldest
    bins = staleness_histogram(ages, last).double() / len(ages)
    shares = {f"{share}{age}{'+' if age == oldest else ''}": float(part) for age, part in enumerate(bins)}
    return {f"{prefix}mean": float(ages.double().mean()), **shares}


def prompt_information_metrics(
    batch: RolloutBatch, rows: np.ndarray, limit: int, score: Callable[[TokenStream], torch.Tensor]
) -> dict[str, float]:
    """RAGEN-2's proxy on the first response to each of the first `limit` prompts, which costs limit² scored sequences.

    Args:
        score: stream → [D] log-probs of the live actor, natively routed: a response joined to another prompt has no
            recorded routes.
    """
    prompts = np.asarray(batch.prompt_ids)[rows]
    chosen = rows[np.sort(np.unique(prompts, return_index=True)[1])][:limit]
    if limit < 2 or len(chosen) < 2:
        return {}
    parts, masks = _crossed(batch, chosen)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    tokens, mask = np.concatenate(parts), np.concatenate(masks)
    logprobs = score(actor_stream(tokens, offsets, mask))
    cut = torch.as_tensor(decision_offsets(mask, offsets), device=logprobs.device)
    sums = torch.segment_reduce(logprobs.double(), "sum", offsets=cut).view(len(chosen), len(chosen))
    found = prompt_information(sums, cut.diff().view(len(chosen), -1)[:, 0])
    return {f"prompts/{name}": float(ratio(value)) for name, value in found._asdict().items()}


def _crossed(batch: RolloutBatch, rows: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens and masks of response i after prompt j, row by row of the [N, N] table."""
    parts = []
    for row in rows:
        own = slice(batch.offsets[row], batch.offsets[row + 1])
        mask = np.asarray(batch.action_mask[own])
        parts.append((np.asarray(batch.tokens[own]), mask, int(mask.argmax())))
    pairs = [(ours, theirs) for ours in parts for theirs in parts]
    tokens = [np.concatenate([theirs[0][: theirs[2]], ours[0][ours[2] :]]) for ours, theirs in pairs]
    masks = [np.concatenate([np.zeros(theirs[2], bool), ours[1][ours[2] :]]) for ours, theirs in pairs]
    return tokens, masks
