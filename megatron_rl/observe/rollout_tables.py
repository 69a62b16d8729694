"""Recorded rollouts for people: a table a shard, every fault, and single trajectories as coloured turns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_rl.errors import RolloutError
from megatron_rl.rollouts._checks import Examination, Limits
from megatron_rl.rollouts.routes import expert_load, missing_rows
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, RolloutHeader, Trajectory
from megatron_rl.rollouts.store import read_batch, read_manifest, shard_paths
from megatron_rl.rollouts.validate import ANY_VERSION, examine, header_faults

_TURN_STYLES = ("bold cyan", "bold magenta", "bold green", "bold yellow")


@dataclass(frozen=True)
class _ShardView:
    """One shard as far as it could be read."""

    name: str
    errors: list[RolloutError]
    batch: RolloutBatch | None = None
    exam: Examination | None = None


def validate_path(
    path: str | os.PathLike,
    *,
    expected: ModelFingerprint | None = None,
    temperature: float | None = None,
    current_version: int | None = None,
    replay: bool = False,
    missing_boundary: str = "error",
    min_route_coverage: float = 0.9,
    console: Console | None = None,
) -> int:
    """Print a line for each shard and every fault found, not just the first.

    Args:
        path: a directory or one shard.
        expected, temperature, current_version: what training would ask for; None accepts each shard's own.

    Returns:
        Exit code: 0 if every shard may be trained on, 1 otherwise.
    """

    def look(file: Path) -> _ShardView:
        errors: list[RolloutError] = []
        try:
            batch = read_batch(file, refused=errors)
        except RolloutError as error:
            return _ShardView(file.name, [error])
        model = expected or batch.header.fingerprint
        wanted = batch.header.sampling.temperature if temperature is None else temperature
        errors += header_faults(batch.header, expected=model, temperature=wanted, file=str(file))
        exam = examine(batch, _limits(model, current_version, replay, missing_boundary, min_route_coverage))
        return _ShardView(file.name, errors + [error for _, error in exam.faults], batch, exam)

    console = console or Console()
    files, errors = _files(Path(path))
    views = [look(file) for file in files]
    console.print(_shard_table(views))
    errors += [error for view in views for error in view.errors]
    for error in errors:
        console.print(Text(str(error), style="red"), soft_wrap=True)
    console.print(f"{len(views)} shards, {len(errors)} faults")
    return 1 if errors else 0


def _limits(
    model: ModelFingerprint, current_version: int | None, replay: bool, missing_boundary: str, coverage: float
) -> Limits:
    return Limits(
        vocab_size=model.vocab_size,
        num_experts=model.num_experts,
        current_version=ANY_VERSION if current_version is None else current_version,
        replay=replay,
        missing_boundary=missing_boundary,
        min_route_coverage=coverage,
        route_layers=slice(None),
    )


def _files(path: Path) -> tuple[list[Path], list[RolloutError]]:
    """Shards to look at, and faults of the directory itself: also shards that were never committed are named."""
    if not path.is_dir():
        return [path], []
    try:
        committed = [path / shard.file for shard in read_manifest(path)]
        errors: list[RolloutError] = []
    except RolloutError as error:
        committed, errors = shard_paths(path, committed=False), [error]
    stray = sorted(set(shard_paths(path, committed=False)) - set(committed))
    errors += [
        RolloutError("shard was never committed", file=file, found="no manifest entry", expected=f"{file.name}.json")
        for file in stray
    ]
    if not committed and not errors:
        errors.append(RolloutError("no committed shard", file=path, found="none", expected="at least one shard"))
    return committed, errors


def _shard_table(views: list[_ShardView]) -> Table:
    table = Table(title="Recorded rollouts")
    table.add_column("shard")
    for name in ("rows", "tokens", "decisions", "turns", "mean reward", "routes", "faults"):
        table.add_column(name, justify="right")
    table.add_column("outcomes")
    for view in views:
        faults = Text(str(len(view.errors)), style="red" if view.errors else "green")
        if view.batch is None or view.exam is None:
            table.add_row(view.name, *["-"] * 6, faults, "unreadable")
            continue
        batch, exam = view.batch, view.exam
        counts = [len(batch), len(batch.tokens), int(exam.decisions.sum()), int(exam.turns.sum())]
        reward = f"{batch.reward.mean():.4g}" if len(batch) else "-"
        with_routes = f"{sum(routes is not None for routes in batch.routes)}/{len(batch)}"
        outcomes = ", ".join(f"{name} {count}" for name, count in Counter(batch.outcome).most_common())
        table.add_row(view.name, *map(str, counts), reward, with_routes, faults, outcomes)
    return table


def describe(path: str | os.PathLike) -> RenderableType:
    """Header and contents of a directory or shard, without judging them.

    Raises:
        RolloutError: it cannot be read.
    """
    files = [Path(path)] if not Path(path).is_dir() else [Path(path) / shard.file for shard in read_manifest(path)]
    batches = [read_batch(file, verify_checksums=False) for file in files]
    views = []
    for file, batch in zip(files, batches, strict=True):
        model = batch.header.fingerprint
        views.append(_ShardView(file.name, [], batch, Examination(batch, _limits(model, None, False, "zero", 0.0))))
    return Group(*[_header_panel(batch.header) for batch in batches[:1]], _shard_table(views))


def _header_panel(header: RolloutHeader) -> Panel:
    model, sampling = header.fingerprint, header.sampling
    layers = len(model.moe_layers)
    lines = [
        f"engine {header.engine}, format {header.format_version}",
        f"model {model.architecture}, vocabulary {model.vocab_size}, tokenizer {model.tokenizer_hash}",
        f"experts {model.num_experts}, top-k {model.topk}, MoE layers {layers}",
        f"temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k}, "
        f"log-probs {sampling.logprobs}",
    ]
    return Panel("\n".join(lines), title="header")


def trajectory_view(
    trajectory: Trajectory, header: RolloutHeader, decode: Callable[[list[int]], str] | None = None
) -> RenderableType:
    """One trajectory as coloured turns with tokens, log-probs and rewards, then the load of its experts.

    Args:
        decode: token ids to text; None shows ids.
    """
    parts: list[Any] = [_summary(trajectory)]
    parts += [_span(trajectory, begin, end, decode) for begin, end in _spans(trajectory.turn_id)]
    if trajectory.boundary_tokens is not None:
        parts.append(Text(f"boundary {_words(trajectory.boundary_tokens, decode)}", style="dim"))
    if trajectory.routes is not None and header.fingerprint.num_experts:
        parts.append(route_load_table(trajectory.routes, header.fingerprint))
    return Group(*parts)


def _summary(trajectory: Trajectory) -> Panel:
    ending = "terminated" if trajectory.terminated else "truncated" if trajectory.truncated else "neither ended nor cut"
    lines = [
        f"prompt {trajectory.prompt_id}, group {trajectory.group_id}",
        f"{len(trajectory.tokens)} tokens, {int(trajectory.action_mask.sum())} decisions, "
        f"{len(trajectory.turn_rewards)} turns",
        f"{trajectory.outcome} ({ending}), reward {trajectory.reward:.4g}",
    ]
    if trajectory.reward_vector is not None:
        lines.append(f"reward components {trajectory.reward_vector.tolist()}")
    if trajectory.metadata:
        lines.append(f"metadata {trajectory.metadata}")
    return Panel(Text("\n".join(lines)), title=trajectory.trajectory_id)


def _spans(turn_id: np.ndarray) -> list[tuple[int, int]]:
    """Runs [begin, end) of equal turn id."""
    cuts = [0, *(np.flatnonzero(np.diff(turn_id)) + 1).tolist(), len(turn_id)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def _words(tokens: np.ndarray, decode: Callable[[list[int]], str] | None) -> str:
    return " ".join(map(str, tokens.tolist())) if decode is None else decode(tokens.tolist())


def _span(trajectory: Trajectory, begin: int, end: int, decode: Callable[[list[int]], str] | None) -> Text:
    turn = int(trajectory.turn_id[begin])
    words = _words(trajectory.tokens[begin:end], decode)
    if turn < 0:
        return Text(f"[{begin}:{end}] {words}", style="dim")
    logprobs = " ".join(f"{value:.3f}" for value in trajectory.logprobs[begin:end])
    versions = sorted(set(trajectory.version[begin:end].tolist()))
    reward = f"{trajectory.turn_rewards[turn]:.4g}" if turn < len(trajectory.turn_rewards) else "none"
    text = Text(f"[{begin}:{end}] turn {turn} {words}\n", style=_TURN_STYLES[turn % len(_TURN_STYLES)])
    return text.append(f"    log-probs {logprobs}; weight version {versions}; turn reward {reward}", style="not bold")


def route_load_table(routes: np.ndarray, model: ModelFingerprint) -> Table:
    """Load of the experts in each MoE layer: missing rows, busiest expert, and max over mean load.

    Args:
        routes: `[L, R, k]`.
    """
    table = Table(title="Expert load")
    for name in ("decoder layer", "rows", "missing", "busiest expert", "its load", "max / mean", "idle experts"):
        table.add_column(name, justify="right")
    load, absent = expert_load(routes, model.num_experts), missing_rows(routes).sum(axis=1)
    for layer, counts, missing in zip(model.moe_layers, load, absent, strict=True):
        mean = counts.mean()
        table.add_row(
            str(layer),
            str(routes.shape[1]),
            str(missing),
            str(counts.argmax()),
            str(counts.max()),
            f"{counts.max() / mean:.2f}" if mean else "-",
            str((counts == 0).sum()),
        )
    return table
