"""Commands on recorded rollouts: validate, import, export."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console


def validate(
    path: Path = typer.Argument(..., help="A directory of recorded rollouts, or one shard."),
    current_version: int = typer.Option(None, help="Weight version of the trainer; later tokens are refused."),
    temperature: float = typer.Option(None, help="Temperature the trainer will use; default: the recorded one."),
    no_replay: bool = typer.Option(False, help="Accept rollouts without routes."),
) -> None:
    """Check recorded rollouts and print every fault: file, row, field, found, expected. Exit code 1 if there is one."""
    from megatron_rl.observe.rollout_tables import validate_path

    raise typer.Exit(
        validate_path(path, replay=not no_replay, temperature=temperature, current_version=current_version)
    )


def import_rollouts(
    files: list[Path] = typer.Argument(..., help="Dumps: JSON lines, or the .pt files slime writes."),
    model: Path = typer.Option(..., help="HF directory of the model that generated them (config.json, tokenizer)."),
    out: Path = typer.Option(..., help="Directory of shards to make; it appears when complete."),
    dump_format: str = typer.Option("auto", "--format", help="slime, vllm, or auto: by the fields of each line."),
    temperature: float = typer.Option(1.0, help="Sampling temperature."),
    top_p: float = typer.Option(1.0, help="Sampling top-p."),
    top_k: int = typer.Option(0, help="Sampling top-k; 0: no limit."),
    logprobs: str = typer.Option("processed", help="processed (of what was sampled from) or raw (unscaled logits)."),
    version: int = typer.Option(None, help="Weight version of all tokens; default: as the dump says."),
    reward_key: str = typer.Option(None, help="Which of several named rewards to take."),
    missing_reward: float = typer.Option(None, help="Reward of records without one; default: that is an error."),
    tokenizer_hash: str = typer.Option(None, help="Fingerprint of the tokenizer; default: the model's own."),
    skip_bad: bool = typer.Option(False, help="Leave bad records out instead of writing nothing."),
) -> None:
    """Turn what slime or vLLM clients dumped into shards; print every fault: file and line, field, found, expected.

    Example: megatron-rl import rollout_0.pt rollout_1.jsonl --model models/qwen3 --out rollouts/imported
    """
    options = dict(locals())
    from megatron_rl.cli.import_rollouts import run_import

    raise typer.Exit(run_import(**options))


def export_rollouts(
    path: Path = typer.Argument(..., help="A directory of recorded rollouts, or one shard."),
    output: Path = typer.Argument(..., help="JSON lines to write: slime's samples, which `import` reads back exactly."),
) -> None:
    """Write recorded rollouts as JSON lines."""
    from megatron_rl.rollouts.interop.dumps import export_dump

    Console().print(f"{export_dump(path, output)} trajectories: {output}", soft_wrap=True)
