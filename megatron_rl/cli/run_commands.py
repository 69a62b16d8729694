"""Commands that take the configuration of a run: train, rollout, score, submit, config.

Bodies import what they need when they run, so that `--help` loads neither torch nor Megatron.
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

CONFIG = typer.Argument(..., help="YAML file of a run, for instance examples/frozen_lake/ppo.yaml.")
OVERRIDES = typer.Argument(
    None,
    help="Dotted settings that win over the file, for instance optimizer.lr=1e-5; further YAML files, as a recipe.",
)


def train(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    rollouts: Path = typer.Option(None, help="Train on these recorded rollouts (a run, or shards); generate none."),
) -> None:
    """Train. Start it with torchrun or srun for several ranks; a run directory with checkpoints is resumed.

    SIGUSR1, SIGTERM or Ctrl-C: the current step is finished, the run saved, and the exit status is 85 (start me again);
    Ctrl-C twice ends at once.

    Example: torchrun --nproc_per_node 2 -m megatron_rl.cli train examples/frozen_lake/ppo.yaml parallel.expert=2
    """
    from megatron_rl.config import load_config
    from megatron_rl.launch.environment import ranks
    from megatron_rl.observe.progress import TerminalProgress
    from megatron_rl.run_dir.lock import run_lock
    from megatron_rl.training.stopping import STOPPED, Stopped, stop_on_signals
    from megatron_rl.training.trainer import Trainer

    recorded = [] if rollouts is None else [f"rollout.recorded={rollouts}"]
    settings = load_config(config, [*(overrides or []), *recorded])
    task = None
    if not settings.rollout.recorded:
        from megatron_rl.environments.tasks import make_task

        task = make_task(settings.rollout.environment, settings.rollout.environment_options)
    with (
        stop_on_signals() as stop,
        ranks(settings) as topology,
        run_lock(settings.output, first=topology.rank == 0),
    ):
        watch = TerminalProgress(Path(settings.output), silent=topology.rank != 0)
        stopped = False
        try:
            Trainer(settings, topology, task, watch, stop).run()
        except Stopped:
            stopped = True
        finally:
            watch.finished()
    # Only here, behind the last barrier: the first rank to leave makes launchers end the others.
    raise typer.Exit(STOPPED if stopped else 0)


def rollout(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    episodes: int = typer.Option(None, help="End after so many recorded episodes; the trainer's data end there."),
    weights: Path = typer.Option(None, help="Generate with this HF checkpoint, without a trainer; needs --episodes."),
    end_with_stdin: bool = typer.Option(False, hidden=True),
) -> None:
    """Generate rollouts for the trainer of the same run directory; it may run elsewhere, and either may be restarted.

    Example: python -m megatron_rl.cli rollout examples/frozen_lake/ppo.yaml rollout.mode=async rollout.external=true
    """
    from megatron_rl.config import load_config
    from megatron_rl.rollout_worker.main import run_rollout_worker

    settings = load_config(config, overrides or [])
    run_rollout_worker(settings, limit=episodes, weights=weights, end_with_stdin=end_with_stdin)


def score(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    rollouts: Path = typer.Option(..., help="A directory of recorded rollouts, or one that holds such directories."),
    output: Path = typer.Option(None, help="Where Arrow files go; default: scores/ in the run directory."),
) -> None:
    """Score recorded rollouts with the models that CONFIG names: log-probs, values, advantages. Nothing is trained.

    Example: python -m megatron_rl.cli score examples/frozen_lake/ppo.yaml --rollouts runs/a/rollouts
    """
    from megatron_rl.config import load_config
    from megatron_rl.launch.environment import ranks
    from megatron_rl.training.actor_critic import build_actor_critic
    from megatron_rl.training.offline_scoring import score_directories

    settings = load_config(config, overrides or [])
    with ranks(settings) as topology:
        target = output or Path(settings.output) / "scores"
        files = score_directories(settings, build_actor_critic(settings, topology), rollouts, target)
        if topology.rank == 0:
            Console().print(f"scored: {', '.join(map(str, files)) or 'nothing new'}", soft_wrap=True)


def submit(
    config: Path = CONFIG,
    overrides: list[str] = OVERRIDES,
    nodes: int = typer.Option(..., help="Trainer nodes."),
    gpus_per_node: int = typer.Option(8, help="GPUs of a node; 0 on a cluster without."),
    tasks_per_node: int = typer.Option(None, help="Ranks of a node; default: one a GPU."),
    rollout_nodes: int = typer.Option(0, help="Nodes that generate rollouts, as a second component of the job."),
    segment: int = typer.Option(1, help="Nodes that NVLink joins (SLURM's --segment)."),
    time: str = typer.Option("", help="Time limit; default: that of slurm/site.env, else 24 hours."),
    partition: str = typer.Option("", help="Default: that of slurm/site.env, else the site's."),
    account: str = typer.Option("", help="Default: that of slurm/site.env, else the site's."),
    name: str = typer.Option("", help="Job name; default: that of the run directory."),
    launcher: str = typer.Option("", help="srun (default), torchrun, pmix or mpirun."),
    container: str = typer.Option("", help="Image for pyxis; default: none."),
    seeds: str = typer.Option("", help="A job array of seeds, for instance 0-3 or 0-7%2."),
    chain: int = typer.Option(1, min=1, help="Jobs, each going on where the one before was stopped."),
    sbatch: list[str] = typer.Option([], help="Further options of sbatch, one each time."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print everything and submit nothing."),
) -> None:
    """Check the layout, then submit a run to SLURM. Prints the plan, the resolved settings and the exact sbatch calls.

    Example: megatron-rl submit examples/qwen3_30b_a3b/ppo.yaml --nodes 4 --dry-run
    """
    from megatron_rl.config import load_config
    from megatron_rl.launch.submit import JobOptions, submit_run

    options = JobOptions(
        nodes, gpus_per_node, tasks_per_node, rollout_nodes, segment, time, partition, account, name, launcher,
        container, seeds, chain, tuple(sbatch),
    )  # fmt: skip
    submit_run(load_config(config, overrides or []), options, config, dry_run=dry_run)


def show_config(config: Path = typer.Argument(None), overrides: list[str] = OVERRIDES) -> None:
    """Print the resolved configuration, every setting with its value, as YAML."""
    from megatron_rl.config import load_config
    from megatron_rl.config.yaml_file import dump_yaml

    print(dump_yaml(load_config(config, overrides or []).model_dump()), end="")
