"""A written directory against its manifest and against its source, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.ahead import ahead
from megatron_rl.hf.audit import Problem, value_problems
from megatron_rl.hf.conversion.conversion import Share
from megatron_rl.hf.conversion.manifest import MANIFEST, Manifest, read_manifest, seal
from megatron_rl.hf.conversion.output_files import Plan, PlannedFile
from megatron_rl.hf.conversion.shards import prepared, read_hashes, tensor_hash
from megatron_rl.hf.conversion.sources import Source


@dataclass(frozen=True)
class Verified:
    """What was compared and found equal."""

    tensors: int
    bytes: int


def verify(
    source: Source,
    target: Path,
    plan: Plan,
    *,
    share: Share | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Read the target back, convert the source once more in memory, and compare both with the manifest.

    Args:
        source, plan: of the conversion.
        target: what it wrote.
        share: files this process compares.
        report: (bytes compared, bytes in all) of this process's share.

    Raises:
        CheckpointError: the first file or tensor that differs, with both hashes.
    """
    share = share or Share()
    manifest = read_manifest(target)
    if share.index == 0:
        _check_others(target, manifest)
    files = plan.files[share.index :: share.count]
    total, done, tensors = sum(file.size for file in files), 0, 0
    for file in files:
        _check_file(source, target, manifest, file)
        done, tensors = done + file.size, tensors + len(file.tensors)
        report(done, total)
    return Verified(tensors, done)


def check(
    source: Source,
    plan: Plan,
    *,
    share: Share | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """Read every tensor as an import would, in the dtype it would be written in, and write nothing.

    Returns:
        Non-finite, constant and misshapen tensors of this process's share. Names were compared when the source was
        opened.
    """
    share, problems, done = share or Share(), [], 0
    files = plan.files[share.index :: share.count]
    for file in files:
        planned = iter(file.tensors)
        for parameter in file.parameters:
            for name, tensor in source.read(parameter):
                wanted = next(planned)
                problems += value_problems(
                    name, tensor.to(wanted.dtype), wanted.shape, may_be_constant=parameter.may_be_constant
                )
        source.release()
        done += file.size
        report(done, sum(each.size for each in files))
    return problems


def _check_file(source: Source, target: Path, manifest: Manifest, file: PlannedFile) -> None:
    on_disk = read_hashes(target / file.name, file)
    for name, tensor in ahead(prepared(file, source)):
        recorded = manifest.tensors.get(name, {}).get("xxh3_128")
        for what, found in (("the written file", on_disk[name]), ("the source", tensor_hash(tensor))):
            if found != recorded:
                raise CheckpointError(
                    f"a tensor of {what} differs from the manifest",
                    file=target / file.name if what != "the source" else source.directory,
                    field=name,
                    found=f"xxh3_128 {found}",
                    expected=recorded,
                    setting="convert again with --overwrite",
                )
    source.release()


def _check_others(target: Path, manifest: Manifest) -> None:
    for name, expected in manifest.files.items():
        path = target / name
        found = seal(path) if path.is_file() else "nothing"
        if found != expected:
            raise CheckpointError(
                "a file differs from the manifest",
                file=path,
                found=found,
                expected=expected,
                setting=f"convert again, or remove {MANIFEST} if the change is meant",
            )
