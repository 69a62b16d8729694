"""Published weight versions: `weights/version-NNNNNN`, HF directories that appear whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_rl.engines.canary import Canary
from megatron_rl.engines.publication import write_publication
from megatron_rl.files import make_durable
from megatron_rl.hf.writer import publish_directory
from megatron_rl.training.agents import Agents
from megatron_rl.training.publish import write_hashed_hf


def publish(agents: Agents, directory: Path, *, canary: Canary | None = None, keep: int = 3) -> Path:
    """Publish the actor's present weights as `version-NNNNNN` for engines to load. Collective.

    The directory appears with everything in it: weights, a manifest of their checksums, and the canary. Versions older
    than the newest `keep` are removed, and later ones too: they are of a run that was lost.

    Args:
        agents: the live parts; `agents.version` names the directory.
        directory: where versions lie.
        canary: what the trainer says of these weights, for engines to check theirs against.
        keep: versions kept: an engine may still be reading the one before.
    """
    target = directory / f"version-{agents.version:06d}"
    staged = target.with_name(f".{target.name}.staged")
    pieces = write_hashed_hf(agents.actor.model, staged, agents.config.model.path)
    if dist.get_rank() == 0:
        if canary is not None:
            canary.write(staged)
        write_publication(staged, agents.version, pieces)
        for file in (*staged.iterdir(), staged):
            make_durable(file)
        publish_directory(staged, target)
        _prune(directory, target.name, keep)
    dist.barrier()
    return target


def _prune(directory: Path, newest: str, keep: int) -> None:
    names = sorted(path.name for path in directory.glob("version-*") if path.is_dir())
    kept = [name for name in names if name <= newest][-keep:]
    for name in set(names) - set(kept):
        shutil.rmtree(directory / name, ignore_errors=True)
