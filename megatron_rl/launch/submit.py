"""Submitting a run to SLURM: the plan, the resolved configuration and the exact `sbatch` calls, shown or carried out.

The batch scripts in `slurm/` hold no hyper-parameters and no sizes; what a job needs travels as sbatch options and as
`MRL_*` variables. A job reads the resolved configuration that was frozen at submission, so an edit of the YAML changes
neither a queued job nor a requeued one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.config import RunConfig
from megatron_rl.config.yaml_file import dump_yaml
from megatron_rl.engines.vllm.options import VllmOptions
from megatron_rl.errors import ConfigError, LaunchError
from megatron_rl.files import write_text
from megatron_rl.launch.plan import Cluster, describe, find_shape, plan_launch

_SETTING = re.compile(r"([A-Z_]+)=(.*)")


@dataclass(frozen=True)
class JobOptions:
    """What a submission asks SLURM for. Empty strings are left to `slurm/site.env`, then to the site's defaults."""

    nodes: int
    gpus_per_node: int
    ranks_per_node: int | None = None
    """Tasks a node; None: one a GPU."""
    rollout_nodes: int = 0
    """Nodes of a second component that generates rollouts; 0: the trainer generates or reads them."""
    segment: int = 1
    time: str = ""
    partition: str = ""
    account: str = ""
    name: str = ""
    launcher: str = ""
    container: str = ""
    seeds: str = ""
    """SLURM array of seeds, for instance `0-3%2`; empty: one job."""
    chain: int = 1
    """Jobs submitted at once, each going on where the one before stopped."""
    sbatch: tuple[str, ...] = ()
    """Further sbatch options."""


@dataclass(frozen=True)
class Submission:
    """One `sbatch` call."""

    command: tuple[str, ...]
    variables: dict[str, str]
    """Exported to the job beside the caller's environment."""

    def __str__(self) -> str:
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.variables.items()), shlex.join(self.command)])


def scripts_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Where the batch scripts are: the checkout the package runs from, or `MRL_ROOT`.

    Raises:
        LaunchError: they are not there.
    """
    root = Path(variables.get("MRL_ROOT") or Path(megatron_rl.__file__).parents[1]).absolute()
    if not (root / "slurm" / "train.sbatch").is_file():
        raise LaunchError(
            "the batch scripts were not found", file=root / "slurm", expected="train.sbatch", setting="MRL_ROOT"
        )
    return root / "slurm"


def read_site(file: Path) -> dict[str, str]:
    """Settings of `site.env`: NAME=value lines; others are comments. Empty where there is no file."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {match[1]: match[2] for line in lines if (match := _SETTING.fullmatch(line))}


def frozen_config(config: RunConfig, text: str) -> Path:
    """Where the resolved configuration of a submission lies: named by its content, so that no job's file changes."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path(config.output).absolute() / "slurm" / f"config-{digest}.yaml"


def submissions(config: RunConfig, options: JobOptions, file: Path, folder: Path) -> list[Submission]:
    """The `sbatch` calls of a run, in order; each link of a chain after the first still lacks its dependency.

    Args:
        config: the run.
        options: what is asked for.
        file: configuration the job reads.
        folder: that of the batch scripts.
    """
    site = read_site(folder / "site.env") | {k: v for k, v in os.environ.items() if k.startswith("MRL_")}
    script = folder / ("train_rollout.sbatch" if options.rollout_nodes else "train.sbatch")
    command = ("sbatch", "--parsable", *_sbatch_options(config, options, site), str(script), str(file))
    return [Submission(command, _variables(config, options, folder, site))] * options.chain


def _sbatch_options(config: RunConfig, options: JobOptions, site: Mapping[str, str]) -> list[str]:
    output = Path(config.output).absolute()
    member = "%A_%a" if options.seeds else "%j"
    chosen = {
        "job-name": options.name or output.name,
        "time": options.time or site.get("MRL_TIME", "24:00:00"),
        "partition": options.partition or site.get("MRL_PARTITION", ""),
        "account": options.account or site.get("MRL_ACCOUNT", ""),
        "array": options.seeds,
        "output": f"{output}/slurm/job-{member}.log",
        "segment": str(options.segment) if options.segment > 1 else "",
    }
    shared = [f"--{name}={value}" for name, value in chosen.items() if value]
    shared += [*shlex.split(site.get("MRL_SBATCH_ARGS", "")), *options.sbatch]
    found = [*shared, *_sizes(options, options.nodes)]
    if options.rollout_nodes:
        # Options before the colon are those of the first component only.
        again = [f"--{name}={chosen[name]}" for name in ("time", "partition", "account") if chosen[name]]
        found += [":", *again, *options.sbatch, *_sizes(options, options.rollout_nodes, ranks=1)]
    return found


def _sizes(options: JobOptions, nodes: int, ranks: int | None = None) -> list[str]:
    tasks = ranks or options.ranks_per_node or options.gpus_per_node
    gpus = [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    return [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", *gpus]


def _variables(config: RunConfig, options: JobOptions, folder: Path, site: Mapping[str, str]) -> dict[str, str]:
    output = Path(config.output).absolute()
    container = options.container or site.get("MRL_CONTAINER")
    found = {
        "MRL_ROOT": str(folder.parent),
        "MRL_OUTPUT": str(output),
        "MRL_LOGS": str(output / "slurm"),
        "MRL_CHECKPOINTS": str(output / "checkpoints"),
        "MRL_LAUNCHER": options.launcher,
        "MRL_CONTAINER": options.container,
        # Outside a container, the interpreter that submits is the one that has everything.
        "MRL_PYTHON": "" if container or site.get("MRL_PYTHON") else sys.executable,
        # The next link of a chain goes on; a requeue would make two of them.
        "MRL_REQUEUE": "0" if options.chain > 1 else "",
    }
    found |= _server_variables(config, options)
    return {name: value for name, value in found.items() if value}


def _server_variables(config: RunConfig, options: JobOptions) -> dict[str, str]:
    """A rollout process reaches engines on several nodes through servers only."""
    rollout = config.rollout
    if not options.rollout_nodes or (options.rollout_nodes == 1 and rollout.engine != "vllm_http") or rollout.servers:
        return {}
    chosen: dict[str, Any] = {"model": config.model.path, "dtype": rollout.engine_dtype or config.model.dtype}
    try:
        words = VllmOptions(**(chosen | rollout.engine_options)).changes()
    except TypeError as error:
        raise ConfigError("vLLM does not take these options", found=error, setting="rollout.engine_options") from error
    # The batch script splits them at spaces.
    if any(" " in word for word in words):
        raise ConfigError(
            "an option of a server cannot be handed to a job", found=words, expected="no spaces",
            setting="rollout.engine_options, or start servers yourself and list them in rollout.servers",
        )  # fmt: skip
    return {"MRL_SERVER_MODEL": config.model.path, "MRL_SERVER_ARGS": " ".join(["--", *words])}


def check_components(config: RunConfig, options: JobOptions) -> None:
    """Refuse rollout nodes that the configuration has no use for.

    Raises:
        LaunchError: the trainer generates rollouts itself, or the embedded engine would leave nodes idle.
    """
    if options.rollout_nodes and not config.rollout.has_process:
        raise LaunchError(
            "rollout nodes were asked for, but the trainer's ranks play themselves",
            found=f"--rollout-nodes {options.rollout_nodes}",
            expected="a rollout process",
            setting="rollout.mode=one_step_off or async, rollout.engine=vllm, or --rollout-nodes 0",
        )
    if options.rollout_nodes > 1 and config.rollout.engine == "embedded":
        raise LaunchError(
            "the embedded engine plays on one node",
            found=f"--rollout-nodes {options.rollout_nodes}",
            expected="1",
            setting="rollout.engine=vllm, or --rollout-nodes 1",
        )


def depending_on(submission: Submission, job: str) -> Submission:
    """The next link of a chain: runs if `job` did not complete, and is removed from the queue if it did."""
    command = list(submission.command)
    command[2:2] = [f"--dependency=afternotok:{job}", "--kill-on-invalid-dep=yes"]
    return Submission(tuple(command), submission.variables)


def submit_run(config: RunConfig, options: JobOptions, file: Path, *, dry_run: bool) -> list[str]:
    """Show the plan, the resolved configuration and the `sbatch` calls of a run, and carry them out.

    Args:
        config: the run.
        options: what is asked for.
        file: the YAML it was read from.
        dry_run: only show.

    Returns:
        Job ids; none in a dry run.

    Raises:
        ConfigError: the layout does not fit cluster or model.
        LaunchError: no batch scripts, rollout nodes without a use, or sbatch refused.
    """
    check_components(config, options)
    folder = scripts_folder()
    ranks = options.ranks_per_node or options.gpus_per_node
    plan = plan_launch(config, Cluster(options.nodes, ranks, options.segment), find_shape(config, file))
    config = config.model_copy(update={"output": str(Path(config.output).absolute())})
    text = dump_yaml(config.model_dump())
    frozen = frozen_config(config, text)
    chain = submissions(config, options, frozen, folder)
    print(f"# {frozen}\n{text}")
    print(*describe(plan), sep="\n")
    for link, submission in enumerate(chain):
        print(f"submit   {depending_on(submission, f'JOB{link}') if link else submission}")
    if dry_run:
        print("nothing was submitted (--dry-run)")
        return []
    frozen.parent.mkdir(parents=True, exist_ok=True)
    write_text(frozen, text)
    jobs = send(chain)
    print(f"jobs     {' '.join(jobs)}; logs in {frozen.parent}")
    return jobs


def send(chain: list[Submission]) -> list[str]:
    """Submit; each submission after the first waits for the one before. Returns job ids.

    Raises:
        LaunchError: sbatch is absent or refused; shows what it said.
    """
    jobs: list[str] = []
    for submission in chain:
        jobs.append(_sbatch(depending_on(submission, jobs[-1]) if jobs else submission))
    return jobs


def _sbatch(submission: Submission) -> str:
    environment = os.environ | submission.variables
    try:
        done = subprocess.run(submission.command, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LaunchError(
            "sbatch was not found", expected="a login node of a SLURM cluster", setting="--dry-run"
        ) from error
    if done.returncode:
        raise LaunchError(
            "sbatch refused the job",
            found=done.stderr.strip() or f"exit status {done.returncode}",
            setting="the options above, or slurm/site.env",
        )
    # `--parsable` prints JOB or JOB;CLUSTER.
    return done.stdout.strip().split(";")[0]
