"""A conversion: finished files are kept, the rest is written, the directory appears when all are there.

    .TARGET.<fingerprint>.partial/model-….safetensors        finished, durable
                                  model-….safetensors.tmp    being written; what a killed process leaves
    .TARGET.<fingerprint>.hashes.partial/model-….json        a finished file's tensors, written after it

The working directory's name carries the plan's fingerprint: files of another source, dtype or shard size are never
taken for this conversion's. The target is one rename.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.errors import CheckpointError, LaunchError
from megatron_rl.files import make_durable, replace_directory, sweep, write_text
from megatron_rl.hf.conversion.manifest import MANIFEST, make_manifest, read_manifest, write_manifest
from megatron_rl.hf.conversion.output_files import Plan, PlannedFile
from megatron_rl.hf.conversion.shards import read_hashes, write_shard
from megatron_rl.hf.conversion.sources import Source
from megatron_rl.hf.json_files import write_json
from megatron_rl.hf.reader import INDEX_FILE
from megatron_rl.hf.writer import check_target, export_settings, side_files

Report = Callable[[int, int], None]
"""(bytes on disk, bytes in all) of the whole conversion; called at most a few times a second."""
_POLL = 0.25


@dataclass(frozen=True)
class Share:
    """Which files are this process's: every `count`-th from number `index`."""

    index: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Share:
        """This process's number among those torchrun, mpirun or srun started; of one process, everything.

        mpirun comes before srun, whose variables mpirun's ranks inherit from its daemons. A batch script has SLURM's
        task count without being a task: only the variables of a step count.

        Raises:
            LaunchError: a launcher gave a number without a count, or the other way round.
        """
        found = os.environ if variables is None else variables
        for launcher, (index, count) in _LAUNCHERS.items():
            if (index in found) != (count in found):
                if launcher == "slurm":
                    continue
                raise LaunchError(
                    f"{launcher} started this process but did not say which part is its own",
                    found=f"no {count if index in found else index}",
                    expected=f"{index} and {count}",
                    setting=f"start with {launcher}, or unset both",
                )
            if index in found:
                return cls(int(found[index]), int(found[count]))
        return cls()


_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}
"""Launcher → variables with a process's number and the count of processes, in the order they are asked."""


@dataclass
class Outcome:
    """What one process did."""

    written: list[str] = field(default_factory=list)
    """Files this process wrote."""
    kept: list[str] = field(default_factory=list)
    """Files of an earlier attempt, found whole."""
    replaced: list[str] = field(default_factory=list)
    """Files of an earlier attempt that were damaged; also in `written`."""
    complete_before: bool = False
    """The target existed already, made from the same source with the same options."""
    seconds: float = 0.0


def convert(
    source: Source,
    target: Path,
    plan: Plan,
    *,
    share: Share | None = None,
    overwrite: bool = False,
    patience: float = 600.0,
    report: Report = lambda done, total: None,
) -> Outcome:
    """Write a model as an HF checkpoint directory that appears whole or not at all.

    Args:
        source: what is converted.
        target: the directory; its parent is made if absent.
        plan: of `make_plan`, with the same source.
        share: this process's part; process 0 also waits for the others and publishes.
        overwrite: replace an HF checkpoint at `target`.
        patience: seconds process 0 waits while no file grows.
        report: progress.

    Raises:
        CheckpointError: the target exists and is another conversion's, the disk is too small, a tensor is bad, or other
            processes stopped writing. What was finished is kept for the same command run again.
    """
    share, begin = share or Share(), time.monotonic()
    if share.index == 0:
        sweep(target.parent, re.escape(target.name))
    if is_complete(target, plan):
        return Outcome(complete_before=True)
    check_target(target, overwrite)
    work = target.with_name(f".{target.name}.{plan.fingerprint[:12]}.partial")
    mine = plan.files[share.index :: share.count]
    if share.index and not mine:
        return Outcome()
    for directory in (work, _records(work)):
        directory.mkdir(parents=True, exist_ok=True)
    _check_space(work, plan)
    progress = _Progress(work, plan, report)
    outcome = Outcome()
    for file in mine:
        _ensure(file, source, work, outcome, progress)
    if share.index == 0:
        hashes = _await_all(work, plan, progress, patience)
        _finish(work, target, plan, source, hashes)
    outcome.seconds = time.monotonic() - begin
    return outcome


def is_complete(target: Path, plan: Plan) -> bool:
    """Whether the target is this plan's finished conversion, going by its manifest and the files' sizes."""
    try:
        if read_manifest(target).fingerprint != plan.fingerprint:
            return False
    except CheckpointError:
        return False
    return all((target / f.name).is_file() and (target / f.name).stat().st_size == f.size for f in plan.files)


class _Progress:
    """Bytes on disk of the whole conversion, whoever wrote them."""

    def __init__(self, work: Path, plan: Plan, report: Report) -> None:
        self._work, self._plan, self._report = work, plan, report
        self._total, self._next = plan.size, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _POLL
            self._report(self.done(), self._total)

    def done(self) -> int:
        """Bytes of finished and of growing files."""
        return sum(_size(self._work / file.name) for file in self._plan.files)


def _size(path: Path) -> int:
    for candidate in (path, path.with_name(path.name + ".tmp")):
        try:
            return candidate.stat().st_size
        except FileNotFoundError:
            continue
    return 0


def _ensure(file: PlannedFile, source: Source, work: Path, outcome: Outcome, progress: _Progress) -> None:
    """Keep a finished file whose bytes are those recorded; else write it."""
    path = work / file.name
    if _record(path) is not None:
        try:
            whole = read_hashes(path, file) == _record(path)
        except CheckpointError:
            whole = False
        if whole:
            outcome.kept.append(file.name)
            return
        outcome.replaced.append(file.name)
        _record_path(path).unlink()
    hashes = write_shard(file, source, path, progress)
    write_text(_record_path(path), json.dumps(hashes))
    outcome.written.append(file.name)


def _records(work: Path) -> Path:
    return work.with_suffix(".hashes.partial")


def _record_path(path: Path) -> Path:
    return _records(path.parent) / (path.name + ".json")


def _record(path: Path) -> dict[str, str] | None:
    """Hashes recorded of a finished file; None: it is not finished."""
    try:
        return json.loads(_record_path(path).read_text())
    except FileNotFoundError:
        return None


def _await_all(work: Path, plan: Plan, progress: _Progress, patience: float) -> dict[str, str]:
    """Name → hash of all tensors, once every file is finished."""
    hashes: dict[str, str] = {}
    seen, since = -1, time.monotonic()
    for file in plan.files:
        while (record := _record(work / file.name)) is None:
            if (done := progress.done()) != seen:
                seen, since = done, time.monotonic()
            if time.monotonic() - since > patience:
                missing = [f.name for f in plan.files if _record(work / f.name) is None]
                raise CheckpointError(
                    "other processes stopped writing",
                    file=work,
                    found=f"{len(missing)} of {len(plan.files)} files missing, no byte for {patience:g} s",
                    expected=missing[0],
                    setting="run the same command again, with any number of processes: finished files are kept",
                )
            progress()
            time.sleep(_POLL)
        hashes |= record
    return hashes


def _finish(work: Path, target: Path, plan: Plan, source: Source, hashes: dict[str, str]) -> None:
    """Write what is not tensors, make it durable, rename; remove what earlier attempts left."""
    write_json(work / "config.json", export_settings(source.directory, source.config, plan.main_dtype))
    if len(plan.files) > 1:
        weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
        size = sum(tensor.stop - tensor.start for tensor in plan.tensors())
        write_json(work / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for file in side_files(source.directory):
        shutil.copyfile(file, work / file.name)
    tensor_files = {file.name for file in plan.files}
    others = sorted(path for path in work.iterdir() if path.name not in tensor_files)
    write_manifest(work, make_manifest(plan, source.identity(), hashes, others))
    for path in (*others, work / MANIFEST, work):
        make_durable(path)
    replace_directory(work, target)
    working = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}(\.hashes)?\.partial")
    for left in target.parent.iterdir():
        if working.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _check_space(work: Path, plan: Plan) -> None:
    needed = plan.size - sum(_size(work / file.name) for file in plan.files)
    free = shutil.disk_usage(work).free
    if free < needed:
        raise CheckpointError(
            f"no room for the conversion ({errno.errorcode[errno.ENOSPC]})",
            file=work,
            found=f"{free / 1e9:.3f} GB free",
            expected=f"{needed / 1e9:.3f} GB",
            setting="TARGET, or --dtype bfloat16",
        )
