"""`megatron-rl`: the table of its commands, `--version`, and errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer
from rich.console import Console
from rich.markup import escape

import megatron_rl
from megatron_rl.cli import checkpoint_commands, rollout_commands, run_commands
from megatron_rl.errors import MegatronRLError

COMMANDS: dict[str, Callable[..., None]] = {
    "train": run_commands.train,
    "convert": checkpoint_commands.convert,
    "rollout": run_commands.rollout,
    "validate": rollout_commands.validate,
    "import": rollout_commands.import_rollouts,
    "export": rollout_commands.export_rollouts,
    "score": run_commands.score,
    "submit": run_commands.submit,
    "config": run_commands.show_config,
}
"""Name of each command → its function, in the order of `--help`."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(megatron_rl.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train mixture-of-experts language models as multi-turn agents with PPO, on Megatron-Core."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run a command; errors made on purpose are shown without a traceback."""
    try:
        app()
    except MegatronRLError as error:
        text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        sys.exit(2)
