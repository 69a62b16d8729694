"""What of a run is saved, and directories that are complete or not there.

    <root>/iteration_00000012/manifest.json   every other file with its size and checksum, written last
                              run.json        cursor, weight version, resolved configuration, layout, library versions
                              random/         states of the random generators, one file a rank
                              states/         tensors (backend/sharded_checkpoint.py)
                              iteration.pt    an iteration stopped in its middle (partial_iteration.py)

A save fills a hidden directory `.iteration_00000012.….partial`, makes it durable, writes the manifest and renames. So a
save that dies, wherever it dies, leaves the checkpoints before it as they were; nothing is deleted before the new one
stands. A manifest makes a directory whole, also a hidden one whose save died just before the rename: the next save
finishes it.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from megatron_rl.backend.random_states import random_states, restore_random_states
from megatron_rl.backend.sharded_checkpoint import (
    ModelStates,
    load_states,
    on_first_rank,
    save_states,
    together,
)
from megatron_rl.backend.topology import Topology
from megatron_rl.errors import CheckpointError
from megatron_rl.files import make_durable, replace_directory, sweep, temporary_name
from megatron_rl.training.actor_critic import ActorCritic

MANIFEST, RUN, RANDOM, STATES = "manifest.json", "run.json", "random", "states"
PARTIAL_ITERATION = "iteration.pt"
LIBRARIES = ("megatron_rl", "megatron-core", "torch", "numpy", "transformer-engine")
_NAME = re.compile(r"iteration_(\d{8,})")
_PARTIAL = re.compile(r"\.(iteration_\d{8,})\.(?:[\w-]+\.)?partial")
_CHUNK = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What `newest_complete` saw."""

    path: Path | None
    """The newest whole checkpoint; None: there is none."""
    skipped: tuple[tuple[Path, str], ...]
    """Newer directories that were passed over, newest first, each with the reason."""


def save_checkpoint(
    root: str | Path,
    iteration: int,
    models: ActorCritic,
    cursor: Mapping[str, Any],
    keep: int,
    *,
    keep_every: int = 0,
    partial_iteration: bytes | None = None,
) -> Path:
    """Save everything a run continues from. Collective over the default process group.

    Args:
        root: directory of the run's checkpoints, seen by all ranks; made if absent.
        iteration: completed iterations; names the directory.
        models: the live parts.
        cursor: where the data stands, as JSON: what the loop needs to go on (iteration, consumed shards, seed state).
        keep: newest checkpoints kept, at least 1.
        keep_every: checkpoints of iterations divisible by this are kept for good; 0: none.
        partial_iteration: what is needed to go on in the middle of the next iteration, stored as `PARTIAL_ITERATION`;
            rank 0's counts.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: on every rank; nothing was added and earlier checkpoints are as they were.
    """
    root = Path(root)
    final = root / f"iteration_{iteration:08d}"
    partial = _shared(temporary_name(final))
    text = together(final, lambda: _run_json(iteration, models, cursor))
    on_first_rank(partial, lambda: _start(partial))
    try:
        save_states(partial / STATES, _states(models))
        own = partial / RANDOM / f"{dist.get_rank():05d}.json"
        together(own, lambda: _write(own, json.dumps(random_states())))
        on_first_rank(partial, lambda: _write(partial / RUN, text))
        if partial_iteration is not None:
            on_first_rank(partial, lambda: (partial / PARTIAL_ITERATION).write_bytes(partial_iteration))
        manifest = _manifest(partial)
        on_first_rank(partial, lambda: _complete(partial, final, manifest))
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    on_first_rank(root, lambda: _prune(root, iteration, keep, keep_every))
    return final


def load_checkpoint(path: str | Path, models: ActorCritic) -> dict[str, Any]:
    """Continue from a checkpoint: fills models, weight version and random generators. Collective; any layout.

    Random generators are restored under the layout that saved them. Under another one there is no such thing as the
    same states: they stay as seeded, with a warning. Nothing random enters a forward pass or an update.

    Returns:
        The cursor given to `save_checkpoint`.

    Raises:
        CheckpointError: on every rank; the checkpoint is incomplete, of another model, or lacks a state this run has.
    """
    path = Path(path)
    run = together(path, lambda: _read_run(path))
    load_states(path / STATES, _states(models))
    models.version = run["version"]
    if run["layout"] == _layout(models.topology):
        own = path / RANDOM / f"{dist.get_rank():05d}.json"
        together(own, lambda: restore_random_states(json.loads(own.read_text())))
    elif dist.get_rank() == 0:
        _log.warning("%s was saved under another layout: random generators stay as seeded", path)
    return run["cursor"]


def newest_complete(root: str | Path) -> Found:
    """The newest checkpoint whose files all have their recorded size and checksum.

    Where a process group exists this is collective: each rank reads its share of the files, and all get one answer.
    """
    root = Path(root)
    names = _shared(sorted((p.name for p in _directories(root)), key=_age, reverse=True))
    skipped: list[tuple[Path, str]] = []
    for name in names:
        reason = faults(root / name, *_rank_and_world())
        reason = next(filter(None, _all(reason)), None)
        if reason is None:
            return Found(root / name, tuple(skipped))
        skipped.append((root / name, reason))
        if _rank_and_world()[0] == 0:
            _log.warning("checkpoint passed over: %s: %s", root / name, reason)
    return Found(None, tuple(skipped))


def faults(path: Path, share: int = 0, shares: int = 1, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint directory, or None.

    Args:
        path: the directory.
        share, shares: look at every `shares`-th file, from number `share`.
        checksums: read every byte; False: compare sizes only.
    """
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name in sorted(files)[share::shares]:
            size, expected = (path / name).stat().st_size, files[name]
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, the manifest says {expected['bytes']}"
            if checksums and (found := _checksum(path / name)) != expected["xxh3_128"]:
                return f"{name} has checksum {found}, the manifest says {expected['xxh3_128']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing: a save or a removal did not finish"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable: {error!r}"
    return None


def _states(models: ActorCritic) -> dict[str, ModelStates]:
    states = {"actor": ModelStates(models.actor, models.anchor, models.reference)}
    return states if models.critic is None else {**states, "critic": ModelStates(models.critic)}


def _run_json(iteration: int, models: ActorCritic, cursor: Mapping[str, Any]) -> str:
    _check_cursor(cursor)
    return json.dumps(
        {
            "iteration": iteration,
            "version": models.version,
            "cursor": cursor,
            "config": models.config.model_dump(mode="json"),
            "layout": _layout(models.topology),
            "libraries": dict(_libraries()),
        },
        indent=1,
    )


def _check_cursor(cursor: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(cursor)) == cursor
    except (TypeError, ValueError):
        same = False
    if not same:
        raise CheckpointError(
            "the cursor does not survive JSON",
            field="cursor",
            found=cursor,
            expected="string keys, lists, numbers, strings",
        )


def _layout(topology: Topology) -> dict[str, Any]:
    """What decides which rank holds what."""
    computed = {"recompute", "distributed_optimizer"}
    return {"world": topology.world, **topology.config.model_dump(mode="json", exclude=computed)}


def _libraries() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _read_run(path: Path) -> dict[str, Any]:
    reason = faults(path, checksums=False)
    if reason is not None:
        raise CheckpointError(
            "checkpoint is not complete", file=path, found=reason, expected="every file of its manifest"
        )
    return json.loads((path / RUN).read_text())


def _start(partial: Path) -> None:
    """An empty directory. Saves that died are finished where only the rename was missing, else removed."""
    for left in _directories(partial.parent):
        if hidden := _PARTIAL.fullmatch(left.name):
            if faults(left, checksums=False) is None:
                _publish(left, left.with_name(hidden[1]))
            else:
                shutil.rmtree(left)
    sweep(partial.parent, _NAME.pattern, alone=True)
    for folder in (RANDOM, STATES):
        (partial / folder).mkdir(parents=True)


def _manifest(partial: Path) -> dict[str, Any]:
    """Sizes and checksums of all files, each read by one rank, on rank 0; None elsewhere. Collective."""
    names = _shared(sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file()))
    rank, world = _rank_and_world()
    mine = together(partial, lambda: {name: _seal(partial / name) for name in names[rank::world]})
    return {"files": {name: entry for entries in _all(mine) for name, entry in entries.items()}}


def _seal(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _complete(partial: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make every file durable, write the manifest, rename."""
    for path in partial.rglob("*"):
        make_durable(path)
    _write(partial / MANIFEST, json.dumps(manifest, indent=1))
    make_durable(partial)
    _publish(partial, final)


def _publish(whole: Path, final: Path) -> None:
    """Give a whole directory its name; what had it gives way. Until then `newest_complete` finds it without."""
    replace_directory(whole, final)


def _remove(directory: Path) -> None:
    # Without its manifest a half-removed directory is not mistaken for a whole one.
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory)


def _prune(root: Path, iteration: int, keep: int, keep_every: int) -> None:
    """Remove what is older than the newest `keep` whole ones up to this iteration, but for every `keep_every`th. Later
    ones are not ours to judge."""
    past = sorted(
        (p for p in _directories(root) if _number(p.name) <= iteration), key=lambda p: _number(p.name), reverse=True
    )
    whole = [p for p in past if faults(p, checksums=False) is None]
    for path in past[past.index(whole[:keep][-1]) + 1 :]:
        if keep_every and path in whole and _number(path.name) % keep_every == 0:
            continue
        try:
            _remove(path)
        except OSError as error:
            _log.warning("old checkpoint %s could not be removed: %r", path, error)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    make_durable(path)


def _directories(root: Path) -> list[Path]:
    found = root.iterdir() if root.is_dir() else ()
    return [p for p in found if p.is_dir() and (_NAME.fullmatch(p.name) or _PARTIAL.fullmatch(p.name))]


def _number(name: str) -> int:
    return int(name.lstrip(".").removeprefix("iteration_").partition(".")[0])


def _age(name: str) -> tuple[int, bool]:
    """Sorts by iteration; a hidden one whose rename is to come is newer than what has the name."""
    return _number(name), name.startswith(".")


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _all(value: Any) -> list[Any]:
    """Every rank's value."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _shared(value: Any) -> Any:
    """Rank 0's value."""
    return _all(value)[0]
