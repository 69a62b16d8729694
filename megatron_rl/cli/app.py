"""`megatron-rl`: thin commands over the package."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from megatron_rl.errors import MegatronRLError

app = typer.Typer(
    help="Train mixture-of-experts language models as multi-turn agents with PPO, on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_CONFIG = typer.Argument(..., help="YAML file of a run, for instance examples/frozen_lake/ppo.yaml.")
_OVERRIDES = typer.Argument(
    None,
    help="Dotted settings that win over the file, for instance optimizer.lr=1e-5; further YAML files, as a recipe.",
)


@app.command()
def train(
    config: Path = _CONFIG,
    overrides: list[str] = _OVERRIDES,
    rollouts: Path = typer.Option(None, help="Train on these recorded rollouts (a run, or shards); nothing is played."),
) -> None:
    """Train. Start it with torchrun or srun for several ranks; a run directory with checkpoints is resumed.

    SIGUSR1 or SIGTERM: the step at hand is finished, the run saved, and the exit status is 85 (start me again).

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


@app.command()
def convert(
    source: Path = typer.Argument(..., help="HF checkpoint, a run directory, or one checkpoint of a run."),
    target: Path = typer.Argument(None, help="Directory to write; it appears when complete. Not with --check."),
    dtype: str = typer.Option("auto", help="float32, bfloat16, float16; auto: as stored, or the model's own dtype."),
    shard_gb: float = typer.Option(5.0, help="Most GB of tensors in one file."),
    agent: str = typer.Option("actor", help="Of a run: actor or critic."),
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
    from megatron_rl.cli.convert import Options, run_conversion

    raise typer.Exit(0 if run_conversion(Options(**options)) else 1)


@app.command()
def rollout(
    config: Path = _CONFIG,
    overrides: list[str] = _OVERRIDES,
    episodes: int = typer.Option(None, help="End after so many recorded episodes; the trainer's data end there."),
    weights: Path = typer.Option(None, help="Play with this HF checkpoint, without a trainer; needs --episodes."),
    end_with_stdin: bool = typer.Option(False, hidden=True),
) -> None:
    """Play without end for the trainer of the same run directory; it may run elsewhere, and either may be restarted.

    Example: python -m megatron_rl.cli rollout examples/frozen_lake/ppo.yaml rollout.mode=async rollout.external=true
    """
    from megatron_rl.config import load_config
    from megatron_rl.rollout_worker.main import run_rollout_worker

    settings = load_config(config, overrides or [])
    run_rollout_worker(settings, limit=episodes, weights=weights, end_with_stdin=end_with_stdin)


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


@app.command("import")
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


@app.command("export")
def export_rollouts(
    path: Path = typer.Argument(..., help="A directory of recorded rollouts, or one shard."),
    output: Path = typer.Argument(..., help="JSON lines to write: slime's samples, which `import` reads back exactly."),
) -> None:
    """Write recorded rollouts as JSON lines."""
    from megatron_rl.rollouts.interop.dumps import export_dump

    Console().print(f"{export_dump(path, output)} trajectories: {output}", soft_wrap=True)


@app.command()
def score(
    config: Path = _CONFIG,
    overrides: list[str] = _OVERRIDES,
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


@app.command()
def submit(
    config: Path = _CONFIG,
    overrides: list[str] = _OVERRIDES,
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
        text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
