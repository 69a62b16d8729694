"""Weights from the trainer to users and engines: streamed HF checkpoints that appear whole.

Published versions lie in `weights/version-NNNNNN` of the run directory. With each goes a canary: log-probs of one
recorded sequence as the trainer computes them, for engines to compare theirs with.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.backend.model import Model
from megatron_rl.backend.step import Readout
from megatron_rl.backend.weights import export_hf
from megatron_rl.batching import actor_stream
from megatron_rl.files import make_durable, replace_directory, sweep, temporary_name
from megatron_rl.hf.shard_file import Piece
from megatron_rl.hf.writer import StreamingWriter
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import select_rows
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import policy_logprobs

if TYPE_CHECKING:
    from megatron_rl.engines.canary import Canary


def publish_weights(models: ActorCritic, directory: Path, *, canary: Canary | None = None, keep: int = 3) -> Path:
    """Publish the actor's present weights as `version-NNNNNN` for engines to load. Collective.

    The directory appears with everything in it: weights, a manifest of their checksums, and the canary. Versions older
    than the newest `keep` are removed, and later ones too: they are of a run that was lost.

    Args:
        models: the live parts; `models.version` names the directory.
        directory: where versions lie.
        canary: what the trainer says of these weights, for engines to check theirs against.
        keep: versions kept: an engine may still be reading the one before.
    """
    # Imported where it is used: a run on recorded rollouts publishes nothing and imports no engine.
    from megatron_rl.engines.publication import write_publication

    target = directory / f"version-{models.version:06d}"
    staged = temporary_name(target)
    if dist.get_rank() == 0:
        sweep(directory, r"version-\d+", alone=True)
    pieces = write_hashed_hf(models.actor.model, staged, models.config.model.path)
    if dist.get_rank() == 0:
        if canary is not None:
            canary.write(staged)
        write_publication(staged, models.version, pieces)
        for file in (*staged.iterdir(), staged):
            make_durable(file)
        replace_directory(staged, target)
        _prune(directory, target.name, keep)
    dist.barrier()
    return target


def _prune(directory: Path, newest: str, keep: int) -> None:
    names = sorted(path.name for path in directory.glob("version-*") if path.is_dir())
    kept = [name for name in names if name <= newest][-keep:]
    for name in set(names) - set(kept):
        shutil.rmtree(directory / name, ignore_errors=True)


LONGEST = 1024
"""Tokens; longer sequences are taken only where no other has two tokens."""


def make_canary(models: ActorCritic, batch: RolloutBatch) -> Canary | None:
    """Score one sequence of a batch under the live weights, at temperature 1, routed natively. Collective.

    Args:
        models: the live parts; unchanged.
        batch: recorded rollouts, the same on every rank.

    Returns:
        None where no sequence has two tokens.
    """
    from megatron_rl.engines.canary import Canary

    row = _choose(batch.lengths)
    if row is None:
        return None
    chosen = select_rows(batch, [row])
    predicted = np.arange(len(chosen.tokens)) > 0
    stream = actor_stream(chosen.tokens, chosen.offsets, predicted)
    plain = Readout(temperature=1.0, chunk=models.config.batching.logprob_chunk)
    logprobs = policy_logprobs(models, stream, chosen, np.zeros(1, np.int64), replay=False, readout=plain)
    return Canary(np.asarray(chosen.tokens), np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()]))


def _choose(lengths: np.ndarray) -> int | None:
    """The longest sequence of at most LONGEST tokens, else the shortest."""
    fitting = np.flatnonzero((lengths >= 2) & (lengths <= LONGEST))
    if len(fitting):
        return int(fitting[lengths[fitting].argmax()])
    longer = np.flatnonzero(lengths >= 2)
    return int(longer[lengths[longer].argmin()]) if len(longer) else None


def write_hf(model: Model, target: Path, source: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a live model as an HF checkpoint. Collective; rank 0 writes, all ranks return when it is complete.

    Args:
        target: directory that appears when done; replaced if it is an earlier export. Nobody else may write it now.
        source: checkpoint whose configuration and tokenizer files go along.
        dtype: cast on the way; None: as trained.
    """
    if dist.get_rank() == 0:
        sweep(target.parent, re.escape(target.name), alone=True)
    write_hashed_hf(model, target, source, dtype=dtype)
    return target


def write_hashed_hf(
    model: Model, target: Path, source: str | Path, *, dtype: torch.dtype | None = None
) -> dict[str, list[Piece]]:
    """As `write_hf`; returns the pieces of each weights file on rank 0, nothing on others."""
    tensors = export_hf(model, dtype=dtype)
    pieces: dict[str, list[Piece]] = {}
    if dist.get_rank() == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        with StreamingWriter(target, model.hf, source, overwrite=True) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
        pieces = writer.pieces
    else:
        for _ in tensors:
            pass
    dist.barrier()
    return pieces
