"""Commands on checkpoints: convert."""

from __future__ import annotations

from pathlib import Path

import typer

from megatron_rl.errors import ConfigError


def convert(
    source: Path = typer.Argument(..., help="HF checkpoint, a run directory, or one checkpoint of a run."),
    target: Path = typer.Argument(None, help="Directory to write; it appears when complete. Not with --check."),
    dtype: str = typer.Option("auto", help="float32, bfloat16, float16; auto: as stored, or the model's own dtype."),
    shard_gb: float = typer.Option(5.0, help="Most GB of tensors in one file."),
    role: str = typer.Option("actor", help="Of a run: actor or critic."),
    agent: str = typer.Option(None, hidden=True),
    state: str = typer.Option("weights", help="Of a run: weights, ewma (the anchor) or reference."),
    hf: Path = typer.Option(None, help="Of a run: HF directory with config.json and tokenizer; default: its own."),
    value_head: str = typer.Option(None, help="Make a critic: zero, random, or the directory of a trained critic."),
    seed: int = typer.Option(0, help="Of a random value head and of the prompt's tokens."),
    keep_mtp: bool = typer.Option(False, help="Copy multi-token-prediction layers; default: leave them out."),
    overwrite: bool = typer.Option(False, help="Replace an HF checkpoint at TARGET."),
    check: bool = typer.Option(False, help="Only read: print every fault, exit code 1 if there is one."),
    verify: bool = typer.Option(False, help="Afterwards compare with the source bit for bit, and logits."),
    logits_gb: float = typer.Option(8.0, help="Compare logits of models up to this many GB in float32."),
    tolerance: float = typer.Option(1e-3, help="Largest difference of logits, relative to the largest logit."),
    prompt: str = typer.Option(None, help="Prompt of the logits; default: 32 random tokens."),
    patience: float = typer.Option(600.0, help="Seconds the first process waits for others that write nothing."),
) -> None:
    """Write weights as an HF checkpoint, on a CPU, a tensor at a time; run it again to continue after a kill.

    Several processes share the files: start it with torchrun, srun or mpirun.
    """
    options = dict(locals())
    if options.pop("agent") is not None:
        raise ConfigError("this option has another name now", found="--agent", expected="--role", setting="--role")
    from megatron_rl.cli.convert import Options, run_conversion

    raise typer.Exit(0 if run_conversion(Options(**options)) else 1)
