"""Trainer and rollout process, both real, over the files of one run directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dist.pool import RankFailure, RankPool

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, EPISODES = 6, 8


def settings(model: Path, output: Path, **changes) -> dict:
    plain = {
        "model": {"path": str(model), "dtype": "float32"},
        "output": str(output),
        "iterations": ITERATIONS,
        "evaluate_every": 0,
        "evaluation_episodes": 4,
        "batching": {"token_budget": 512},
        "optimizer": {"lr": 1e-3},
        "critic_optimizer": {"lr": 1e-3},
        "algorithm": {
            "minibatches": 2,
            "importance": {"name": "sequence", "cap": 2.0},
            "anchor": {"name": "ewma", "decay": 0.5},
        },  # fmt: skip
        "rollout": {
            "episodes": EPISODES,
            "max_turns": 3,
            "max_action_tokens": 2,
            "mode": "async",
            "max_staleness": 2,
            "shard_seconds": 0.2,
            "concurrency": 12,
            "environment_options": {"evaluation_maps": 4, "invalid_reward": -0.3, "step_reward": -0.05},
        },
    }
    for name, value in changes.items():
        plain[name] = {**plain[name], **value} if isinstance(value, dict) and name in plain else value
    return plain


class Watch:
    """Keeps every iteration's metrics; may end the process, as a crash would."""

    def __init__(self, die_after: int | None) -> None:
        self.rows: list[dict[str, float]] = []
        self._die_after = die_after

    def started(self, iterations: int, done: int) -> None: ...

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        self.rows.append({"iteration": iteration, **values})
        if iteration == self._die_after:
            os._exit(9)


def train(plain: dict, die_after: int | None = None) -> list[dict[str, float]]:
    """What a rank does; a run with `rollout.recorded` gets no task."""
    from megatron_rl.backend import topology
    from megatron_rl.config import parse_config
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.trainer import Trainer

    config = parse_config(plain)
    rollout = config.rollout
    task = None if rollout.recorded else make_task(rollout.environment, rollout.environment_options)
    watch = Watch(die_after)
    Trainer(config, topology.initialize(config.parallel, seed=config.seed), task, watch).run()
    return watch.rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_checkpoint(path, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2, moe_hidden_size=16))
    return path


@dataclass(frozen=True)
class Run:
    plain: dict
    output: Path
    rows: list[dict[str, float]]


CURRICULUM = {
    "environment": "tests.dist.graded:GradedLake",
    "stagger_turns": 1,
    "curriculum": {"levels": [{"distances": [1, 1]}, {"distances": [2, 2]}, {}], "promote_at": 0.05, "window": 8},
}


@pytest.fixture(scope="module")
def live(ranks: RankPool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An asynchronous run on two ranks whose trainer was killed once and started again."""
    output = tmp_path_factory.mktemp("live") / "run"
    plain = settings(tiny, output, parallel={"expert": 2}, checkpoint={"every": 2}, rollout=CURRICULUM)
    with pytest.raises(RankFailure, match="exit code 9"):
        ranks.run(train, 2, plain, 2)
    wait_for_no_process(output)
    return Run(plain, output, ranks.run(train, 2, plain)[0])


def ledger_rows(output: Path) -> list[list[tuple[str, int]]]:
    """(shard, row) of each iteration."""
    lines = [json.loads(line) for line in (output / "consumed.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    return [[(file, row) for file, rows in line["shards"] for row in rows] for line in lines]


def rollout_processes(output: Path) -> list[int]:
    """Of this run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "rollout" in words and any(word.startswith(str(output)) or word.endswith(str(output)) for word in words):
                found.append(int(path.parent.name))
    return found


def wait_for_no_process(output: Path) -> None:
    end = time.monotonic() + 30
    while rollout_processes(output):
        assert time.monotonic() < end, "a rollout process outlived its trainer"
        time.sleep(0.1)


def same_weights(one: Path, other: Path) -> bool:
    files = ("export/model.safetensors", "export-critic/model.safetensors")
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_a_run_finishes_over_a_crash_and_uses_every_trajectory_once(live: Run) -> None:
    assert [row["iteration"] for row in live.rows] == list(range(2, ITERATIONS))
    used = [place for places in ledger_rows(live.output) for place in places]
    assert len(used) == len(set(used)) == ITERATIONS * EPISODES
    assert live.rows[-1]["evaluation/version"] == ITERATIONS
    kept = sorted(path.name for path in (live.output / "weights").iterdir())
    assert kept == [f"version-{version:06d}" for version in range(ITERATIONS - 2, ITERATIONS + 1)]
    wait_for_no_process(live.output)


def test_no_token_is_staler_than_allowed(live: Run) -> None:
    ages = [row["stream/staleness_max"] for row in live.rows if "stream/staleness_max" in row]
    assert ages and max(ages) <= 2 and max(ages) > 0
    shares = [sum(v for k, v in row.items() if k.startswith("stream/staleness_share/")) for row in live.rows[1:]]
    assert all(abs(share - 1) < 1e-9 for share in shares)


def test_nothing_was_played_twice_nor_beyond_the_room(live: Run) -> None:
    from megatron_rl.rollouts.store import read_batch

    folders = sorted((live.output / "rollouts/stream").iterdir())
    ids = [name for folder in folders for name in read_batch(folder).trajectory_ids]
    assert len(ids) == len(set(ids))
    # Room is counted from what was trained on, so a crash does not inflate it.
    assert len(ids) <= (ITERATIONS + 3) * EPISODES


def test_the_level_outlives_both_and_no_block_mixes_two(live: Run) -> None:
    from megatron_rl.rollouts.store import read_batch

    told = [row["curriculum/level"] for row in live.rows if "curriculum/level" in row]
    assert told and told == sorted(told) and told[-1] >= 1
    batch = read_batch(sorted((live.output / "rollouts/stream").glob("*/*.arrow")))
    levels: dict[int, int] = {}
    for metadata in batch.metadata:
        assert levels.setdefault(metadata["block"], metadata["level"]) == metadata["level"]
        assert metadata["start_turn"] in (0, 1)
    assert [levels[block] for block in sorted(levels)] == sorted(levels.values()) and max(levels.values()) == 2


def test_recorded_files_alone_train_the_same_parameters(ranks: RankPool, live: Run, tmp_path: Path, tiny: Path) -> None:
    replayed = settings(
        tiny, tmp_path / "replay", parallel={"expert": 2}, rollout={"recorded": str(live.output)}, iterations=99
    )
    rows = ranks.run(train, 2, replayed)[0]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS)), "the run ends where the records do"
    assert same_weights(live.output, tmp_path / "replay")
    assert (tmp_path / "replay/checkpoints" / f"iteration_{ITERATIONS:08d}").is_dir()
    assert not (tmp_path / "replay/weights").exists() and not (tmp_path / "replay/rollouts").exists()
    trained = (live.output / "export/model.safetensors").read_bytes()
    assert trained != (tiny / "model.safetensors").read_bytes()


def test_shards_without_a_ledger_are_cut_into_iterations(
    ranks: RankPool, live: Run, tmp_path: Path, tiny: Path
) -> None:
    from megatron_rl.rollouts.store import read_manifest

    stream = live.output / "rollouts" / "stream"
    total = sum(shard.rows for folder in stream.iterdir() for shard in read_manifest(folder))
    plain = settings(tiny, tmp_path / "foreign", rollout={"recorded": str(stream), "episodes": 20}, iterations=99)
    rows = ranks.run(train, 1, plain)[0]
    sizes = [row["rollout/trajectories"] for row in rows]
    assert sum(sizes) == total and set(sizes[:-1]) == {20}
    again = settings(tiny, tmp_path / "foreign", rollout={"recorded": str(stream), "episodes": 20}, iterations=99)
    assert ranks.run(train, 1, again)[0] == [], "a run that goes on does not take them again"


@pytest.mark.full
def test_shards_without_a_ledger_go_on_after_what_a_crash_lost(
    ranks: RankPool, live: Run, tmp_path: Path, tiny: Path
) -> None:
    """The newest checkpoint is lost: iteration 1 takes its trajectories again, and iteration 2 those after them."""
    output, recorded = tmp_path / "foreign", {"recorded": str(live.output / "rollouts/stream"), "episodes": 8}
    ranks.run(train, 1, settings(tiny, output, rollout=recorded, iterations=2, checkpoint={"every": 1}))
    shutil.rmtree(output / "checkpoints/iteration_00000002")
    rows = ranks.run(train, 1, settings(tiny, output, rollout=recorded, iterations=4))[0]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    used = [place for places in ledger_rows(output) for place in places]
    assert len(used) == len(set(used)) == 32


def test_recorded_training_imports_no_engine(live: Run, tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(settings(tiny, tmp_path / "alone", iterations=1)))
    script = (
        "import sys; from megatron_rl.cli.app import app\n"
        f"sys.argv = ['megatron-rl', 'train', {str(config)!r}, '--rollouts', {str(live.output)!r}]\n"
        "try: app()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print([m for m in sys.modules if m.startswith(('megatron_rl.engines', 'transformers', 'vllm'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().endswith("[]"), done.stdout[-2000:] + done.stderr[-2000:]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def reject(plain: dict, times: int) -> tuple[int, str]:
    """A trainer whose published weights an engine refuses: how often it published, and how that ended."""
    from megatron_rl.backend import topology
    from megatron_rl.config import parse_config
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.errors import EngineVersionError
    from megatron_rl.run_dir.exchange import Exchange
    from megatron_rl.training.rollout_sources import streaming as stream
    from megatron_rl.training.stopping import Stopped, StopRequest
    from megatron_rl.training.trainer import Trainer

    stream.POLL_SECONDS = 0.05
    config, stop = parse_config(plain), StopRequest()
    exchange = Exchange(Path(config.output))
    trainer = Trainer(
        config, topology.initialize(config.parallel, seed=0), make_task("frozen_lake", {}), Watch(None), stop
    )
    first = (exchange.weights / "version-000000").stat().st_ino
    exchange.reject(0, "the canary scores differently")
    if times == 1:
        stop.request()
    try:
        trainer.source.next_rollouts(0, 0)
    except Stopped:
        return int((exchange.weights / "version-000000").stat().st_ino != first), str(exchange.rejection(0))
    except EngineVersionError as error:
        return 2, str(error)
    return 0, "went on"


def test_refused_weights_are_published_again(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    plain = settings(tiny, tmp_path / "once", rollout={"external": True})
    assert ranks.run(reject, 1, plain, 1) == [(1, "None")]


def silent(plain: dict) -> str:
    from megatron_rl.errors import LaunchError

    try:
        train(plain)
    except LaunchError as error:
        return str(error)
    return "went on"


def test_a_missing_rollout_process_is_an_error(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    plain = settings(tiny, tmp_path / "none", rollout={"external": True, "start_timeout": 0.5})
    said = ranks.run(silent, 2, plain)
    assert said[0] == said[1] and "no rollout process is alive" in said[0] and "0 of 8" in said[0]


def test_a_fresh_run_does_not_take_what_another_recorded(ranks: RankPool, live: Run, tiny: Path) -> None:
    plain = {**live.plain, "checkpoint": {"resume": False}}
    with pytest.raises(RankFailure, match="recorded rollouts of an earlier one"):
        ranks.run(train, 2, plain)


@contextlib.contextmanager
def rollout_process(plain: dict, folder: Path, *options: str) -> Iterator[subprocess.Popen]:
    """An external one."""
    config = folder / "rollout.yaml"
    config.write_text(json.dumps(plain))
    command = [sys.executable, "-m", "megatron_rl.cli", "rollout", str(config), *options]
    with open(folder / "rollout.log", "ab") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
def test_data_end_where_the_rollout_process_ends(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    plain = settings(tiny, tmp_path / "run", rollout={"external": True, "max_staleness": 4})
    with rollout_process(plain, tmp_path, "--episodes", "20") as process:
        rows = ranks.run(train, 1, plain)[0]
        assert process.wait(30) == 0
    assert [row["rollout/trajectories"] for row in rows] == [8, 8, 4]
    assert (tmp_path / "run/checkpoints/iteration_00000003").is_dir() and (tmp_path / "run/export").is_dir()


@pytest.mark.full
def test_a_killed_rollout_process_is_started_again_and_repeats_nothing(
    ranks: RankPool, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    plain = settings(tiny, output, iterations=12, rollout={"environment": "tests.dist.slow_lake:SlowLakeTask"})
    killer = subprocess.Popen([sys.executable, "-c", KILLER, str(output)])
    rows = ranks.run(train, 1, plain)[0]
    assert killer.wait(30) == 0, "nothing was killed"
    assert len(rows) == 12 and max(row["stream/staleness_max"] for row in rows) <= 2
    used = [place for places in ledger_rows(output) for place in places]
    assert len(used) == len(set(used)) == 12 * EPISODES
    from megatron_rl.rollout_worker.shard_writer import recorded_ids

    ids = sorted(recorded_ids(output / "rollouts/stream"))
    assert ids[: 12 * EPISODES // 2] == sorted(f"train-{b:06d}-{i:05d}" for b in range(6) for i in range(EPISODES))


KILLER = """
import os, pathlib, signal, sys, time
output = pathlib.Path(sys.argv[1])
for _ in range(600):
    lines = output / "consumed.jsonl"
    if lines.exists() and lines.read_text().count("\\n") >= 3:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\\0")
            except OSError:
                continue
            if "rollout" in words and str(output / "exchange/rollout.yaml") in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
                sys.exit(0)
    time.sleep(0.1)
sys.exit(1)
"""


GROUPS = {"environment_options": {"maps_per_prompt": 4, "invalid_reward": -0.3, "evaluation_maps": 4}}
MODES = {
    "one_step_off": {"rollout": {"mode": "one_step_off"}},
    "single": {"rollout": {"complete_groups": False}},
    "groups": {"rollout": GROUPS},
    "refill": {
        "rollout": {**GROUPS, "max_staleness": 0, "environment": "tests.dist.graded:CoarseLake"},
        "algorithm": {"estimator": "grpo", "dynamic_sampling": {"rounds": 2}},
    },
    "colocated": {"rollout": {"mode": "sync", "colocated": True}, "parallel": {"phase_offload": True}},
}


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_other_modes_finish_within_their_bound(ranks: RankPool, tiny: Path, tmp_path: Path, mode: str) -> None:
    slow = {"environment": "tests.dist.slow_lake:SlowLakeTask"} if mode in ("one_step_off", "single") else {}
    changes = {**MODES[mode], "rollout": {**MODES[mode]["rollout"], **slow}}
    rows = ranks.run(train, 1, settings(tiny, tmp_path / "run", **changes))[0]
    assert len(rows) == ITERATIONS
    bound = {"one_step_off": 1, "refill": 0, "colocated": 0}.get(mode, 2)
    assert max(row["stream/staleness_max"] for row in rows) <= bound
    if mode == "refill":
        assert max(row["sampling/rounds"] for row in rows) == 2, "some groups have equal rewards"
    used = [place for places in ledger_rows(tmp_path / "run") for place in places]
    assert len(used) == len(set(used)) >= ITERATIONS * EPISODES


@pytest.mark.full
def test_a_colocated_run_trains_a_lost_iteration_again(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    """Its rows are there, and still the trainer waits until the engine has left the device."""
    output = tmp_path / "run"
    plain = settings(tiny, output, iterations=4, checkpoint={"every": 2}, **MODES["colocated"])
    with pytest.raises(RankFailure, match="exit code 9"):
        ranks.run(train, 1, plain, 2)
    wait_for_no_process(output)
    rows = ranks.run(train, 1, plain)[0]
    assert [row["iteration"] for row in rows] == [2, 3]
    used = [place for places in ledger_rows(output) for place in places]
    assert len(used) == len(set(used)) == 4 * EPISODES


@pytest.mark.full
def test_a_full_disk_holds_the_run_up_and_no_more(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    """The rollout process may not write files of more than 4 KiB for a while."""
    import resource

    output = tmp_path / "run"
    plain = settings(tiny, output, iterations=3, rollout={"external": True})
    with rollout_process(plain, tmp_path) as process:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, hard))
        freed = subprocess.Popen([sys.executable, "-c", FREE_DISK, str(process.pid), str(output)])
        rows = ranks.run(train, 1, plain)[0]
        assert freed.wait(10) == 0, "the problem was never told"
    assert len(rows) == 3 and list((output / "rollouts/stream").rglob("*.tmp")) == []


FREE_DISK = """
import json, pathlib, resource, sys, time
pid, output = int(sys.argv[1]), pathlib.Path(sys.argv[2])
told = False
for _ in range(600):
    try:
        told = "could not be written" in json.loads((output / "exchange/heartbeat.json").read_text())["problem"]
    except (OSError, ValueError):
        pass
    if told:
        break
    time.sleep(0.1)
resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.exit(0 if told else 1)
"""
