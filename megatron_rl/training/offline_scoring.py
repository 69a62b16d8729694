"""Scores of recorded rollouts as Arrow files, without training: what two models think of what was played.

One file for each directory of shards, with a row for each trajectory that may enter a loss:

    file, row, trajectory_id, logprobs, behaviour, reference?, values, advantages, returns

The lists are float32, one entry for each decision, log-probs in nats. Files appear whole, so a restart goes on with the
directories that have none.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.errors import RolloutError
from megatron_rl.files import atomic_file
from megatron_rl.rollouts.schema import ModelFingerprint
from megatron_rl.rollouts.store import shard_paths
from megatron_rl.rollouts.validate import ANY_VERSION
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import policy_logprobs
from megatron_rl.training.records import ScoredBatch
from megatron_rl.training.rollout_sources.validation import UNKNOWN_TOKENIZER, load_validated
from megatron_rl.training.score import score_batch


def score_directories(config: RunConfig, models: ActorCritic, rollouts: Path, output: Path) -> list[Path]:
    """Score shards, directory by directory. Collective; rank 0 writes.

    Args:
        config: the run.
        models: live models.
        rollouts: a directory of shards, or one that holds such directories, like a run's `rollouts/`.
        output: `NAME.arrow` for a directory NAME is written here.

    Returns:
        Files written now; those that were there are left out.

    Raises:
        RolloutError: no shards, or a fault that `validate` finds.
    """
    expected = ModelFingerprint.of(models.actor.model.hf, UNKNOWN_TOKENIZER)
    written = []
    for directory in shard_directories(rollouts):
        target = output / f"{directory.name}.arrow"
        if not _on_all_ranks(target.exists()):
            batch, _ = load_validated(config, directory, expected, ANY_VERSION)
            scored = score_batch(models, batch)
            logprobs = policy_logprobs(models, scored.actor, batch, scored.rows)
            if dist.get_rank() == 0:
                _write(target, scores_table(scored, logprobs))
            written.append(target)
    return written


def shard_directories(path: Path) -> list[Path]:
    """`path` itself if it holds shards, else the directories below it that do, in the order of their names.

    Raises:
        RolloutError: there are none.
    """
    found = [folder for folder in [path, *sorted(path.glob("*/"))] if shard_paths(folder, committed=False)]
    if not found:
        raise RolloutError("no recorded rollouts", file=path, expected="*.arrow here or one level below")
    return found[:1] if found[0] == path else [folder for folder in found if folder.name != "quarantine"]


def scores_table(scored: ScoredBatch, logprobs: torch.Tensor) -> pa.Table:
    """One row a trajectory of `scored.rows`.

    Args:
        scored: a scored batch.
        logprobs: [D] log-probs of the policy.
    """
    batch, rows = scored.batch, scored.rows
    decisions = {
        "logprobs": logprobs,
        "behaviour": scored.behaviour,
        "reference": scored.reference,
        "values": scored.values,
        "advantages": scored.advantages,
        "returns": scored.returns,
    }
    offsets = pa.array(scored.offsets.cpu().numpy(), pa.int64())
    columns = {
        "file": pa.array([batch.sources[row][0] for row in rows]),
        "row": pa.array([batch.sources[row][1] for row in rows], pa.int32()),
        "trajectory_id": pa.array([batch.trajectory_ids[row] for row in rows]),
    }
    for name, vector in decisions.items():
        if vector is not None:
            flat = pa.array(vector.float().cpu().numpy(), pa.float32())
            columns[name] = pa.LargeListArray.from_arrays(offsets, flat).take(pa.array(rows))
    return pa.table(columns)


def _write(target: Path, table: pa.Table) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)


def _on_all_ranks(here: bool) -> bool:
    """Rank 0's answer: a file that has just appeared may be visible to some ranks only."""
    answer = [here]
    dist.broadcast_object_list(answer)
    return answer[0]
