"""A real SLURM cluster on this host and the tiny runs that are submitted to it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from megatron_rl.config import RunConfig, load_config
from megatron_rl.rollouts.store import read_batch, trajectory_at

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "slurm" / "slurm_local.sh"
NODES = 4
LAYOUT = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=2")
"""Four ranks, one a node, every pair of them in some group."""
ITERATIONS = 6
TIMES = ("seconds/", "throughput/")
"""Metrics that say how long something took."""
SETTINGS = """\
iterations: {iterations}
evaluate_every: 0
evaluation_episodes: 8
model: {{path: {model}, dtype: float32}}
parallel: {{}}
batching: {{token_budget: 1024}}
optimizer: {{lr: 1.0e-3}}
critic_optimizer: {{lr: 1.0e-3}}
algorithm: {{minibatches: 2, anchor: {{name: ewma, decay: 0.5}}, importance: {{name: sequence, cap: 2.0}}}}
rollout:
  environment: frozen_lake
  environment_options: {{view: moves, invalid_reward: -0.1, step_reward: -0.05}}
  episodes: 8
  max_turns: 4
  max_action_tokens: 3
checkpoint: {{every: 1, keep: 3}}
"""


class Cluster:
    """Commands of `slurm_local.sh` for one directory."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory, self._settings = directory, settings
        self.conf = directory / "etc" / "slurm.conf"

    def start(self, nodes: int = NODES) -> None:
        """Bring it up, or mend its nodes."""
        self._call("start", str(nodes))

    def stop(self) -> None:
        """Cancel everything and end the daemons."""
        self._call("stop")

    def run(self, *command: str, **variables: str) -> str:
        """Output of a command that finds this cluster."""
        return self._call("run", *command, **variables)

    def wait(self, job: str, seconds: int = 300) -> str:
        """The job's last state, when it has ended; raises after `seconds`."""
        done = self._ask("wait", job, str(seconds))
        assert done.returncode != 124, f"job {job} is not done: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def kill_node(self, node: str) -> None:
        """Cut a node's power."""
        self._call("kill-node", node)

    def start_node(self, node: str) -> None:
        """Boot it again."""
        self._call("start-node", node)

    def nodes_of(self, job: str) -> list[str]:
        """Nodes a job runs on."""
        listed = self.run("squeue", "-h", "-j", job, "-o", "%N").split()
        return self.run("scontrol", "show", "hostnames", listed[0]).split() if listed else []

    def state(self, job: str) -> str:
        """JobState of a job."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return next(word.split("=")[1] for word in words if word.startswith("JobState="))

    def _call(self, action: str, *arguments: str, **variables: str) -> str:
        done = self._ask(action, *arguments, **variables)
        assert done.returncode == 0, f"{action} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def _ask(self, action: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MRL_"))}
        environment |= self._settings | variables
        return subprocess.run(
            ["bash", str(SCRIPT), action, str(self.directory), *arguments],
            env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These environment variables, and no SLURM's but them."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith(("SLURM_", "MRL_"))]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_model(folder: Path, head_dim: int = 16) -> Path:
    """A tiny random policy and the YAML of a run from it; returns the YAML."""
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.tasks import make_task

    task = make_task("frozen_lake", {"view": "moves"})
    shape = TinyShape(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=head_dim, num_experts=4, moe_hidden_size=32,
        max_positions=256,
    )  # fmt: skip
    write_tiny_checkpoint(folder / "model", task.vocabulary, shape, seed=3)
    file = folder / "run.yaml"
    file.write_text(SETTINGS.format(iterations=ITERATIONS, model=folder / "model"))
    return file


def submit(
    cluster: Cluster, file: Path, output: Path, *overrides: str, layout: tuple[str, ...] = LAYOUT, nodes: int = NODES,
    variables: dict[str, str] | None = None, **options,
) -> list[str]:  # fmt: skip
    """Submit a run as a user would; one rank a node unless said otherwise. Returns job ids."""
    # Brings Megatron along, for which nobody waits who only asks for help.
    from megatron_rl.launch.submit import JobOptions, submit_run

    config: RunConfig = load_config(file, [*layout, f"output={output}", *overrides])
    options = {"gpus_per_node": 1, "time": "00:20:00"} | options
    with environment(SLURM_CONF=str(cluster.conf), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **(variables or {})):
        return submit_run(config, JobOptions(nodes=nodes, **options), file, dry_run=False)


def metrics(output: Path) -> list[dict]:
    """Recorded iterations, what took time left out."""
    file = output / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def exported(output: Path) -> dict[str, np.ndarray]:
    """Exported weights of policy and critic."""
    tensors = {}
    for folder in ("export", "export-critic"):
        for file in sorted((output / folder).glob("*.safetensors")):
            tensors |= {f"{folder}/{name}": tensor for name, tensor in load_file(file).items()}
    return tensors


def consumed(output: Path) -> list[dict]:
    """Lines of the ledger."""
    return [json.loads(line) for line in (output / "consumed.jsonl").read_text().splitlines()]


def log_text(output: Path) -> str:
    """Everything a run's jobs printed."""
    return "".join(file.read_text(errors="replace") for file in sorted((output / "slurm").glob("*.log")))


def until(found, seconds: float = 90, what: str = "condition"):
    """Poll until `found()` is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return value


def rank_process(job: str, rank: int) -> int | None:
    """Number of the process that is this rank of a job, as the host counts; None: there is none now."""
    return _process("megatron_rl.cli", {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"})


def server_process(job: str, node: int) -> int | None:
    """As `rank_process`: the vLLM server on this node of the component that generates."""
    # Its port is told from the job's number: slurm/lib.sh, slurm/train_rollout.sbatch.
    return _process("vllm.entrypoints.openai.api_server", set(), f"--port={10000 + int(job) % 20000 + 1 + node}")


def _process(module: str, variables: set[str], *more: str) -> int | None:
    """Of a Python that was told to run this module, with these variables and further words."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            python = Path(words[0]).name.startswith("python") and "-m" in words[:3] and {module, *more} <= set(words)
            if python and variables <= set((folder / "environ").read_bytes().decode(errors="replace").split("\0")):
                return int(folder.name)
        except OSError:
            continue
    return None


def assert_same_run(output: Path, reference: Path) -> None:
    """A run that was disturbed ended like one that was not: metrics, weights and data, bit for bit."""
    assert metrics(output) == metrics(reference)
    ours, theirs = exported(output), exported(reference)
    assert ours.keys() == theirs.keys() and ours
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    assert_each_iteration_trained_once(output)


def assert_like_run(output: Path, reference: Path, start: Path) -> None:
    """A run whose layout changed trained on the same tokens in the same order, and ended with the same weights but for
    rounding: their distance is below a hundredth of the way that the run went from `start`."""
    assert_each_iteration_trained_once(output)
    assert played(output) == played(reference)
    begun = load_file(start / "model.safetensors")
    ours, theirs = exported(output), exported(reference)
    assert ours.keys() == theirs.keys()
    names = [f"export/{name}" for name in begun]
    way = sum(np.square(theirs[name] - begun[name.removeprefix("export/")]).sum() for name in names)
    apart = sum(np.square(ours[name] - theirs[name]).sum() for name in names)
    assert apart < 1e-4 * way, (apart, way)


def played(output: Path) -> dict[str, list[int]]:
    """Tokens of every trajectory that was trained on."""
    found = {}
    for entry in consumed(output):
        batch = read_batch([output / file for file, _ in entry["shards"]])
        for trajectory in (trajectory_at(batch, row) for row in range(len(batch))):
            found[trajectory.trajectory_id] = trajectory.tokens.tolist()
    return found


def assert_each_iteration_trained_once(output: Path) -> None:
    """Every iteration stepped, in order, on trajectories that no other iteration used."""
    rows = metrics(output)
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    assert all(row["actor/stepped"] == 1 and row["actor/grad_norm"] > 0 for row in rows)
    entries = consumed(output)
    assert [entry["iteration"] for entry in entries] == list(range(len(rows)))
    used = [(file, row) for entry in entries for file, chosen in entry["shards"] for row in chosen]
    assert len(used) == len(set(used)) > 0
