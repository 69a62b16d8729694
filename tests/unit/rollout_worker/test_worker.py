"""The rollout worker with the embedded engine, without a trainer: its settings, and its level after a kill."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config import RunConfig, parse_config
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.local_async import LocalAsyncEngine
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.frozen_lake import lake_vocabulary
from megatron_rl.environments.levels import training_tasks
from megatron_rl.environments.tasks import make_task
from megatron_rl.rollout_worker.worker import RolloutWorker
from megatron_rl.rollouts.schema import RolloutBatch
from megatron_rl.rollouts.store import read_batch
from megatron_rl.run_dir.exchange import Exchange
from megatron_rl.training.rollout_sources.sync import play

BLOCK, WINDOW = 8, 10
PLAIN = {
    "environment": "tests.dist.graded:GradedLake",
    "environment_options": {"evaluation_maps": 4, "maps_per_prompt": 2},
    "episodes": BLOCK,
    "max_turns": 3,
    "max_action_tokens": 2,
    "concurrency": 4,
    "shard_episodes": 1,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_checkpoint(path, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2, moe_hidden_size=16))
    return path


def configured(output: Path, **rollout) -> RunConfig:
    return parse_config({"output": str(output), "evaluation_episodes": 4, "rollout": PLAIN | rollout})


def task_of(config: RunConfig):
    return make_task(config.rollout.environment, config.rollout.environment_options)


def record(config: RunConfig, engine: LocalAsyncEngine, limit: int, killed_when=None) -> None:
    """Play up to the limit, or kill the worker as soon as `killed_when` holds."""

    async def run() -> None:
        worker = RolloutWorker(config, task_of(config), engine, limit, alone=True)
        playing = asyncio.create_task(worker.run())
        while not playing.done() and not (killed_when is not None and killed_when(worker)):
            await asyncio.sleep(0.001)
        playing.cancel()
        try:
            await playing
        except asyncio.CancelledError:
            assert killed_when is not None
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def recorded(config: RunConfig) -> RolloutBatch:
    return read_batch(sorted(Exchange(Path(config.output)).stream.glob("*/*.arrow")))


def embedded(weights: Path, seed: int = 0) -> LocalAsyncEngine:
    return LocalAsyncEngine(LocalEngine(weights, seed=seed))


def test_levels_rise_over_a_kill_and_no_block_mixes_them(weights: Path, tmp_path: Path) -> None:
    """The first process is killed with a block of level 0 half recorded and the level risen."""
    levels = [{"distances": [1, 1]}, {"distances": [2, 2]}, {}]
    curriculum = {"levels": levels, "promote_at": 0.05, "window": WINDOW}
    config = configured(tmp_path, curriculum=curriculum, stagger_turns=1)
    record(config, embedded(weights), 64, lambda w: w._curriculum.level == 1 and w._writer.written > WINDOW)
    before = recorded(config).metadata
    halves = [block for block, n in Counter(m["block"] for m in before).items() if n < BLOCK]
    assert halves and {m["level"] for m in before if m["block"] in halves} == {0}, "the kill came at another moment"
    record(config, embedded(weights, seed=1), 64)

    batch = recorded(config)
    at = {}
    for metadata in batch.metadata:
        assert at.setdefault(metadata["block"], metadata["level"]) == metadata["level"]
    assert len(batch) == len(set(batch.trajectory_ids)) == 64
    assert [at[block] for block in sorted(at)] == sorted(at.values()) and set(at.values()) == {0, 1, 2}
    assert all(at[block] == 0 for block in halves) and min(at[b] for b in at if b > max(halves) + 1) >= 1
    played = training_tasks(config, task_of(config))
    specs = {s.trajectory_id: s for block, level in at.items() for s in played[level].training_specs(block, BLOCK)}
    assert set(specs) == set(batch.trajectory_ids)
    for name, prompt, metadata in zip(batch.trajectory_ids, batch.prompt_ids, batch.metadata, strict=True):
        assert specs[name].prompt_id == prompt
        assert metadata["start_turn"] <= specs[name].options["start_turn"]
    heartbeat, _ = Exchange(tmp_path).heartbeat()
    assert (heartbeat.state, heartbeat.level) == ("finished", 2) and 0 < heartbeat.success <= 1


class DroppingEngine(LocalAsyncEngine):
    """Never completes the first call of each episode."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine)
        self.calls: Counter[int] = Counter()

    async def agenerate(self, prompt, max_new_tokens, stop_tokens, greedy=False):
        self.calls[len(prompt)] += 1
        if self.calls[len(prompt)] == 1:
            await asyncio.sleep(3600)
        return await super().agenerate(prompt, max_new_tokens, stop_tokens, greedy)


@pytest.mark.parametrize(("retries", "outcome"), [(0, "aborted"), (1, "truncated_turns")])
def test_an_engine_call_that_times_out_is_repeated(weights: Path, tmp_path: Path, retries: int, outcome: str) -> None:
    settings = {"engine_timeout": 0.5, "engine_retries": retries, "max_turns": 1, "concurrency": 1}
    config = configured(tmp_path, **settings, environment_options={"evaluation_maps": 4})
    record(config, DroppingEngine(LocalEngine(weights)), 1)
    assert recorded(config).outcome == (outcome,)


class HangingEngine(LocalAsyncEngine):
    """Never completes a call."""

    async def agenerate(self, prompt, max_new_tokens, stop_tokens, greedy=False):
        await asyncio.sleep(3600)


def test_first_episodes_start_spread_over_the_stagger_time(weights: Path, tmp_path: Path) -> None:
    begun: dict[int, float] = {}

    def all_begun(worker: RolloutWorker) -> bool:
        begun.setdefault(worker._scheduler.begun, time.monotonic())
        return worker._scheduler.begun == 4

    record(configured(tmp_path, stagger_seconds=0.8), HangingEngine(LocalEngine(weights)), 4, all_begun)
    assert sorted(begun)[-4:] == [1, 2, 3, 4] and 0.5 < begun[4] - begun[1] < 5


@pytest.mark.parametrize("greedy", [False, True])
def test_repetition_cuts_training_and_evaluation_alike(weights: Path, tmp_path: Path, greedy: bool) -> None:
    config = configured(tmp_path, repetition={"identical_actions": 1})
    task = task_of(config)
    specs = task.evaluation_specs(4) if greedy else task.training_specs(0, 4)
    played = play(config, LocalEngine(weights), task, specs, greedy=greedy)
    assert [trajectory.outcome for trajectory in played] == ["repetition"] * 4
    if not greedy:
        record(config, embedded(weights), 4)
        assert recorded(config).outcome == ("repetition",) * 4
