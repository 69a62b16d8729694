"""Real training on a real SLURM: every launcher, every fault, and afterwards the same run as without it.

A model is cut TP 2 · PP 2 · EP 2 over four nodes, one rank each. "The same run" means: metrics of every iteration
(times left out), exported weights of policy and critic and the ledger of consumed trajectories, bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from tests.slurm.harness import (
    ITERATIONS,
    LAYOUT,
    NODES,
    ROOT,
    Cluster,
    assert_each_iteration_trained_once,
    assert_like_run,
    assert_same_run,
    exported,
    log_text,
    metrics,
    rank_process,
    server_process,
    submit,
    until,
    write_model,
)
from tools.lanes import interpreter_of

REPLICAS = ("parallel.tensor=2", "parallel.expert=2")
"""Two data replicas on four ranks, one on two."""


def after(output: Path, iterations: int) -> None:
    """Wait until a run has recorded so many iterations."""
    until(lambda: len(metrics(output)) >= iterations, 120, f"{iterations} iterations in {output}")


def finished(cluster: Cluster, job: str, output: Path, restarts: int) -> None:
    """Wait for a job; it completed after so many restarts."""
    assert f"COMPLETED Restarts={restarts} ExitCode=0:0" in cluster.wait(job), log_text(output)[-3000:]


def test_srun_trains_every_step_on_new_data(reference: Path) -> None:
    assert len(metrics(reference)) == ITERATIONS
    assert all(np.isfinite(tensor).all() for tensor in exported(reference).values())


def test_stop_signal_saves_requeues_and_continues(
    whole: Cluster, run_file: Path, reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    (job,) = submit(whole, run_file, output)
    after(output, 2)
    whole.run("scancel", "--batch", "--signal=USR1", job)
    finished(whole, job, output, restarts=1)
    assert "after it was asked to stop" in log_text(output) and "crash 1 of" not in log_text(output)
    assert_same_run(output, reference)


def test_a_killed_rank_ends_the_others_and_the_run_continues(
    whole: Cluster, run_file: Path, reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    (job,) = submit(whole, run_file, output)
    after(output, 2)
    os.kill(rank_process(job, rank=2), signal.SIGKILL)
    start = time.monotonic()
    until(lambda: "crash 1 of" in log_text(output), 60, "the other ranks ended")
    assert time.monotonic() - start < 60
    finished(whole, job, output, restarts=1)
    assert_same_run(output, reference)


@pytest.mark.full
def test_a_lost_node_is_replaced(whole: Cluster, run_file: Path, reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = submit(whole, run_file, output)
    after(output, 2)
    node = whole.nodes_of(job)[-1]
    whole.kill_node(node)
    until(lambda: whole.state(job) != "RUNNING", 60, "SLURM noticed")
    whole.start_node(node)
    finished(whole, job, output, restarts=1)
    assert_same_run(output, reference)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "pmix", "mpirun"])
def test_every_launcher_gives_the_same_run_and_takes_the_stop_signal(
    launcher: str, whole: Cluster, run_file: Path, reference: Path, tmp_path: Path
) -> None:
    if launcher != "torchrun" and not shutil.which("mpirun"):
        pytest.skip("Open MPI is not installed")
    if launcher == "pmix" and not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    output = tmp_path / "run"
    variables = {
        "MRL_MPIRUN_ARGS": "--allow-run-as-root --oversubscribe",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    (job,) = submit(whole, run_file, output, launcher=launcher, variables=variables)
    after(output, 2)
    whole.run("scancel", "--batch", "--signal=USR1", job)
    finished(whole, job, output, restarts=1)
    assert "after it was asked to stop" in log_text(output) and "crash 1 of" not in log_text(output)
    assert_same_run(output, reference)


@pytest.mark.full
def test_slurm_itself_gives_the_warning_before_the_time_limit(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    more = "iterations=500"
    (job,) = submit(whole, run_file, output, more, time="00:02:00", sbatch=("--signal=B:USR1@30",))
    until(lambda: "restart 1" in log_text(output), 240, "SLURM signalled and the job went on")
    assert "after it was asked to stop" in log_text(output)
    done = len(metrics(output))
    after(output, done + 1)
    whole.run("scancel", job)
    whole.wait(job)
    assert_each_iteration_trained_once(output)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "then"),
    [(REPLICAS, REPLICAS), (LAYOUT, ("parallel.pipeline=2",))],
    ids=["fewer_replicas", "other_groups"],
)
def test_four_nodes_go_on_as_two(
    before: tuple[str, ...], then: tuple[str, ...], whole: Cluster, run_file: Path, reference: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    (job,) = submit(whole, run_file, output, layout=before)
    after(output, 2)
    whole.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: "after it was asked to stop" in log_text(output), 60, "the stop")
    whole.run("scancel", "--full", job)
    whole.wait(job)
    (smaller,) = submit(whole, run_file, output, layout=then, nodes=NODES // 2)
    finished(whole, smaller, output, restarts=0)
    assert_like_run(output, reference, run_file.parent / "model")


@pytest.mark.full
def test_trainer_and_rollouts_as_components_of_one_job(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    layout = ("parallel.tensor=2", "parallel.expert=2", "rollout.mode=one_step_off", "algorithm.anchor=ewma")
    (job,) = submit(whole, run_file, output, layout=layout, nodes=2, rollout_nodes=1)
    finished(whole, job, output, restarts=0)
    assert len(metrics(output)) == ITERATIONS
    assert_each_iteration_trained_once(output)


@pytest.mark.full
def test_servers_on_nodes_of_their_own_play_for_the_trainer(
    whole: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = interpreter_of("requirements/lock-vllm-py311.txt")
    if not Path(python).exists():
        pytest.skip("vLLM's environment is not installed (make setup-vllm)")
    output = tmp_path / "run"
    # vLLM has no CPU kernel for smaller attention heads.
    file = write_model(tmp_path_factory.mktemp("vllm"), head_dim=32)
    small = (
        "{kv_cache_bytes: 67108864, max_num_seqs: 16, max_model_len: 256, extra: {distributed_executor_backend: uni}}"
    )
    layout = (
        "parallel.tensor=2", "parallel.expert=2", "rollout.mode=async", "rollout.max_staleness=2",
        "rollout.engine=vllm_http", "algorithm.anchor=ewma", f"rollout.engine_options={small}",
    )  # fmt: skip
    variables = {"MRL_PYTHON": python}
    (job,) = submit(whole, file, output, layout=layout, nodes=2, rollout_nodes=2, variables=variables)
    until(lambda: metrics(output), 300, "the first iteration")
    os.kill(server_process(job, node=1), signal.SIGKILL)
    assert "COMPLETED Restarts=0" in whole.wait(job, 500), log_text(output)[-5000:]
    rows = metrics(output)
    assert len(rows) == ITERATIONS
    assert rows[0]["first_step/k3"] < 1e-6, "the trainer recognises what the servers sampled"
    assert max(row["replay/missing"] for row in rows) == 0
    assert not list((output / "weights").glob("*.rejected.json"))
    assert_each_iteration_trained_once(output)
    (served,) = (output / "slurm").glob("job-*-serve.log")
    answered = {line[:2] for line in served.read_text().splitlines() if '/completions HTTP/1.1" 200' in line}
    assert answered == {"0:", "1:"}, "both servers answered"
    assert "1: the server ended with status 137: started again" in served.read_text()


@pytest.mark.full
def test_ranks_of_a_job_convert_a_run_together(whole: Cluster, reference: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    sizes = ("--nodes=4", "--ntasks=4", f"--output={tmp_path}/job.log")
    variables = {"MRL_ROOT": str(ROOT), "MRL_PYTHON": sys.executable, "MRL_LOGS": str(tmp_path / "slurm")}
    script = str(ROOT / "slurm" / "convert.sbatch")
    arguments = (str(reference), str(target), "--shard-gb", "0.00002")
    job = whole.run("sbatch", "--parsable", *sizes, script, *arguments, **variables)
    assert "COMPLETED" in whole.wait(job.strip()), log_text(tmp_path) + (tmp_path / "job.log").read_text()
    files = sorted(target.glob("*.safetensors"))
    assert len(files) >= 4, "a file for every rank"
    found = {f"export/{name}": tensor for file in files for name, tensor in load_file(file).items()}
    expected = {name: tensor for name, tensor in exported(reference).items() if name.startswith("export/")}
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


@pytest.mark.full
def test_an_array_trains_a_run_a_seed(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (job,) = submit(whole, run_file, output, "iterations=2", layout=(), nodes=1, seeds="0-1%1")
    assert whole.wait(job, 240).count("COMPLETED") == 2
    weights = []
    for seed in (0, 1):
        assert_each_iteration_trained_once(output / f"seed-{seed}")
        weights.append(exported(output / f"seed-{seed}"))
    assert any(not np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.full
def test_scores_of_recorded_rollouts_are_what_the_sampler_recorded(
    whole: Cluster, reference: Path, tmp_path: Path
) -> None:
    (config,) = (reference / "slurm").glob("config-*.yaml")
    # Played by the weights the run began with, and scored by them: the model that `model.path` names.
    rollouts = reference / "rollouts" / "iteration-000000"
    sizes = ("--nodes=4", "--ntasks-per-node=1", f"--output={tmp_path}/job.log")
    variables = {"MRL_ROOT": str(ROOT), "MRL_PYTHON": sys.executable, "MRL_LOGS": str(tmp_path / "slurm")}
    script = str(ROOT / "slurm" / "score.sbatch")
    job = whole.run("sbatch", "--parsable", *sizes, script, str(config), str(rollouts), str(tmp_path), **variables)
    assert "COMPLETED" in whole.wait(job.strip()), log_text(tmp_path)
    with pa.memory_map(str(tmp_path / "iteration-000000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    flat = {name: table[name].combine_chunks().flatten().to_numpy() for name in ("logprobs", "behaviour", "values")}
    assert table.num_rows == 8 and np.abs(flat["logprobs"] - flat["behaviour"]).max() < 1e-5
    assert all(np.isfinite(vector).all() and len(vector) > 0 for vector in flat.values())


def test_a_second_job_on_the_same_run_is_refused(whole: Cluster, run_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (first,) = submit(whole, run_file, output, "iterations=40", layout=(), nodes=1)
    after(output, 1)
    (second,) = submit(whole, run_file, output, layout=(), nodes=1, variables={"MRL_LOCK_WAIT": "5"})
    assert "FAILED Restarts=0 ExitCode=2:0" in whole.wait(second)
    finished(whole, first, output, restarts=0)
    assert_each_iteration_trained_once(output)
