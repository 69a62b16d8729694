"""`megatron-rl`: thin commands over the package."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console

from megatron_rl.errors import MegatronRLError

app = typer.Typer(
    help="Train mixture-of-experts language models as multi-turn agents with PPO, on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_CONFIG = typer.Argument(..., help="YAML file of a run, for instance examples/frozen_lake/ppo.yaml.")
_OVERRIDES = typer.Argument(None, help="Dotted settings that win over the file, for instance optimizer.lr=1e-5.")


@app.command()
def train(config: Path = _CONFIG, overrides: list[str] = _OVERRIDES) -> None:
    """Train. Start it with torchrun or srun for several ranks; a run directory with checkpoints is resumed.

    SIGUSR1 or SIGTERM: the step at hand is finished, the run saved, and the exit status is 85 (start me again).

    Example: torchrun --nproc_per_node 2 -m megatron_rl.cli train examples/frozen_lake/ppo.yaml parallel.expert=2
    """
    from megatron_rl.config import load_config
    from megatron_rl.engines.tasks import make_task
    from megatron_rl.launch.environment import ranks
    from megatron_rl.observe.progress import TerminalWatch
    from megatron_rl.training.lock import run_lock
    from megatron_rl.training.loop import Loop
    from megatron_rl.training.stopping import STOPPED, Stopped, stop_on_signals

    settings = load_config(config, overrides or [])
    task = make_task(settings.rollout.environment, settings.rollout.environment_options)
    with (
        stop_on_signals() as stop,
        ranks(settings) as topology,
        run_lock(settings.output, first=topology.rank == 0),
    ):
        watch = TerminalWatch(Path(settings.output), silent=topology.rank != 0)
        try:
            Loop(settings, topology, task, watch, stop).run()
        except Stopped:
            raise typer.Exit(STOPPED) from None
        finally:
            watch.finished()


@app.command()
def validate(
    path: Path = typer.Argument(..., help="A directory of recorded rollouts, or one shard."),
    current_version: int = typer.Option(None, help="Weight version of the trainer; later tokens are refused."),
    temperature: float = typer.Option(None, help="Temperature the trainer will use; default: the recorded one."),
    no_replay: bool = typer.Option(False, help="Accept rollouts without routes."),
) -> None:
    """Check recorded rollouts and print every fault: file, row, field, found, expected. Exit code 1 if there is one."""
    from megatron_rl.rollouts.describe import validate_path

    raise typer.Exit(
        validate_path(path, replay=not no_replay, temperature=temperature, current_version=current_version)
    )


@app.command("config")
def show_config(config: Path = typer.Argument(None), overrides: list[str] = _OVERRIDES) -> None:
    """Print the resolved configuration, every setting with its value, as YAML."""
    from omegaconf import OmegaConf

    from megatron_rl.config import load_config

    print(OmegaConf.to_yaml(load_config(config, overrides or []).model_dump()))


def main() -> None:
    """Run a command; errors made on purpose are shown without a traceback."""
    try:
        app()
    except MegatronRLError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {error}", soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
