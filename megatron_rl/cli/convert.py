"""`megatron-rl convert`: options, progress with the remaining time, a summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.hf.audit import Problem, audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.conversion.conversion import Outcome, Share, convert
from megatron_rl.hf.conversion.manifest import MANIFEST
from megatron_rl.hf.conversion.output_files import Plan, make_plan
from megatron_rl.hf.conversion.sources import Source, parse_dtype
from megatron_rl.hf.conversion.verify import check, verify
from megatron_rl.hf.quantised import open_checkpoint
from megatron_rl.training.checkpoint_source import Role, RunSource, State, compare_outputs, float32_bytes, open_source

_LOG_EVERY = 10.0
"""Seconds between lines where the output is no terminal."""


@dataclass(frozen=True)
class Options:
    """What `megatron-rl convert` was asked for; each field is the option of the same name."""

    source: Path
    target: Path | None
    dtype: str = "auto"
    shard_gb: float = 5.0
    role: Role = "actor"
    state: State = "weights"
    hf: Path | None = None
    value_head: str | None = None
    seed: int = 0
    keep_mtp: bool = False
    overwrite: bool = False
    check: bool = False
    verify: bool = False
    logits_gb: float = 8.0
    tolerance: float = 1e-3
    prompt: str | None = None
    patience: float = 600.0


def run_conversion(options: Options, console: Console | None = None) -> bool:
    """Convert, or with `check` only read, and print a summary. Of several processes the first prints it.

    Returns:
        Whether all is well; False: `check` found faults and printed them.

    Raises:
        CheckpointError: source or target cannot be converted, or they differ.
        ConfigError: options that contradict each other.
        LaunchError: a launcher gave a process number without a count.
    """
    console, share = console or Console(), Share.from_environment()
    _check_options(options)
    if options.check and (options.source / "config.json").is_file():
        problems = audit_checkpoint(open_checkpoint(options.source), read_hf_config(options.source), values=False)
        if problems.problems:
            return _show_problems(problems.problems, console)
    source = open_source(
        options.source,
        role=options.role,
        state=options.state,
        hf=options.hf,
        value_head=options.value_head,
        seed=options.seed,
        keep_mtp=options.keep_mtp,
    )
    dtype = None if options.dtype == "auto" else parse_dtype(options.dtype)
    plan = make_plan(source, dtype=dtype, max_shard_bytes=int(options.shard_gb * 1e9))
    silent = share.index > 0
    if options.target is None:
        with _progress(console, "reading", silent) as report:
            return _show_problems(check(source, plan, share=share, report=report), console)
    with _progress(console, "writing", silent) as report:
        outcome = convert(
            source,
            options.target,
            plan,
            share=share,
            overwrite=options.overwrite,
            patience=options.patience,
            report=report,
        )
    rows = list(_written(options, options.target, source, plan, outcome))
    if options.verify:
        rows += _verify(options, options.target, source, plan, share, console, silent)
    if not silent:
        _show(rows, console)
    return True


def _check_options(options: Options) -> None:
    if (options.target is None) != options.check:
        raise ConfigError(
            "nothing to write to" if options.target is None else "a check writes nothing",
            found=f"TARGET {options.target}, --check {options.check}",
            expected="either TARGET or --check",
            setting="TARGET or --check",
        )
    if options.target is not None and options.target.resolve() == options.source.resolve():
        raise CheckpointError(
            "source and target are one", file=options.source, expected="another TARGET", setting="TARGET"
        )
    if options.shard_gb <= 0:
        raise ConfigError("no room in a file", found=options.shard_gb, expected="> 0", setting="--shard-gb")


def _written(options: Options, target: Path, source: Source, plan: Plan, outcome: Outcome) -> Iterator[tuple[str, str]]:
    tensors = sum(1 for _ in plan.tensors())
    yield "source", str(getattr(source, "path", options.source))
    yield "target", str(target)
    yield "model", f"{source.config.model_type}, {source.config.head} head"
    yield "tensors", f"{tensors} in {len(plan.files)} files, {decimal(plan.size)}, {plan.main_dtype}"
    yield from (("note", note) for note in source.notes())
    if outcome.complete_before:
        yield "written", "nothing: the target stood already, made from this source with these options"
        return
    damaged = f", {len(outcome.replaced)} of them damaged" if outcome.replaced else ""
    yield "written", f"{len(outcome.written)} files by this process in {outcome.seconds:.1f} s{damaged}"
    yield "kept", f"{len(outcome.kept)} files of an earlier attempt"
    yield "manifest", str(target / MANIFEST)


def _verify(
    options: Options, target: Path, source: Source, plan: Plan, share: Share, console: Console, silent: bool
) -> list[tuple[str, str]]:
    """Summary rows. Other processes than the first compare their share once the target has appeared."""
    _await(target, options.patience)
    if isinstance(source, RunSource):
        source.check_bytes(share)
    with _progress(console, "comparing", silent) as report:
        found = verify(source, target, plan, share=share, report=report)
    rows = [("bit for bit", f"{found.tensors} tensors equal to the source and to the manifest")]
    if not silent:
        rows.append(("logits", _logits(options, target, source)))
    return rows


def _await(target: Path, patience: float) -> None:
    since = time.monotonic()
    while not target.is_dir():
        if time.monotonic() - since > patience:
            raise CheckpointError("the target did not appear", file=target, expected="process 0 to publish it")
        time.sleep(0.2)


def _logits(options: Options, target: Path, source: Source) -> str:
    size = float32_bytes(source.config)
    if size > options.logits_gb * 1e9:
        return f"not compared: {decimal(size)} in float32, --logits-gb allows {options.logits_gb:g} GB"
    found = compare_outputs(target, _prompt(options, target, source.config.vocab_size), tolerance=options.tolerance)
    return (
        f"largest difference to transformers {found.difference:.2e}, outputs up to {found.scale:.3g}, "
        f"{found.same_choice} of {found.positions} choices equal"
    )


def _prompt(options: Options, target: Path, vocabulary: int) -> list[int]:
    if options.prompt is None:
        return np.random.default_rng(options.seed).integers(0, vocabulary, 32).tolist()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)(options.prompt)["input_ids"]


def _show_problems(problems: Any, console: Console) -> bool:
    for problem in problems:
        console.print(_line(problem), soft_wrap=True, highlight=False)
    console.print(f"{len(problems)} faults" if problems else "every tensor is there, finite and of its shape")
    return not problems


def _line(problem: Problem) -> str:
    return f"{problem.kind}: {problem.tensor}: found {problem.found}, expected {problem.expected}"


def _show(rows: list[tuple[str, str]], console: Console) -> None:
    table = Table("conversion", "", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


@contextlib.contextmanager
def _progress(console: Console, what: str, silent: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar in a terminal, a line now and then elsewhere, nothing from other processes than the first."""
    if silent:
        yield lambda done, total: None
    elif not console.is_terminal:
        yield _Lines(console, what)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress for a log file."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._first: int | None = None
        self._last = self._begin = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            # What stood before counts as done, not as speed.
            self._first, self._begin = done, now
        if now - self._last < _LOG_EVERY:
            return
        self._last = now
        speed = (done - self._first) / max(now - self._begin, 1e-9)
        left = f"{(total - done) / speed:.0f} s left" if speed else "not moving"
        self._console.print(f"{self._what} {decimal(done)} of {decimal(total)}, {decimal(int(speed))}/s, {left}")
