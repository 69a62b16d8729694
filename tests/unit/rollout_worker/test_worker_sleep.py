"""When the engine of a colocated rollout process leaves the device, and what the trainer is told; a real process loop,
real files, an engine that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.engines.vllm.replica import Description, Footprint
from megatron_rl.errors import ConfigError, EngineVersionError
from megatron_rl.rollout_worker import engines as rollout_engines
from megatron_rl.rollout_worker.worker import RolloutWorker
from megatron_rl.run_dir.exchange import Exchange, Heartbeat, Progress
from tests.unit.engines.test_vllm_engine import CountingReplica, versions
from tests.unit.episodes.counting import HEADER, CountingEngine, counting_environment, specs_of

__all__ = ["versions"]
EPISODES = 4


@dataclass(frozen=True)
class Words:
    fingerprint: str = "none"


class ShortTask:
    """Episodes of one or two turns."""

    vocabulary = Words()

    def training_specs(self, block: int, count: int):
        return [
            type(spec)(f"{block}-{spec.trajectory_id}", spec.prompt_id, spec.group_id, spec.seed, spec.options)
            for spec in specs_of([1, 2] * (count // 2))
        ]

    def evaluation_specs(self, count: int):
        return []

    def make_env(self, spec):
        return counting_environment(spec)


class SleepyEngine(CountingEngine):
    """Writes down what happens to it; is awake after an update, also after one that it refuses."""

    context_limit = 256

    def __init__(self) -> None:
        super().__init__(jitter=0.02)
        self.told: list[str] = []
        self.asleep, self.bad = False, set[int]()

    def header(self, tokenizer_hash: str):
        return HEADER

    async def agenerate(self, *arguments, **named):
        self.asleep = False
        return await super().agenerate(*arguments, **named)

    async def update(self, weights: Path, version: int) -> None:
        self.asleep = False
        await asyncio.sleep(0.05)
        if version in self.bad:
            self.told.append(f"refused {version}")
            raise EngineVersionError("other weights", file=weights)
        self.version = version
        self.told.append(f"serves {version}")

    async def sleep(self) -> Footprint:
        assert not self.at_once, "sent to sleep under a call"
        self.asleep = True
        self.told.append(f"rests {self.version}")
        return Footprint(1000, 10 + self.version)


@dataclass
class Stage:
    """A run directory in which the test is the trainer."""

    exchange: Exchange
    engine: SleepyEngine = field(default_factory=SleepyEngine)

    def publish(self, version: int, taken: int) -> None:
        (self.exchange.weights / f"version-{version:06d}").mkdir(parents=True)
        self.exchange.write_progress(Progress(version, taken))

    async def until(self, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
        for _ in range(1000):
            found, _ = self.exchange.heartbeat()
            if found is not None and condition(found):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"never so: {found}, {self.engine.told}")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(Exchange(tmp_path))


def play(stage: Stage, trainer) -> None:
    """Run the rollout process beside a trainer, which ends the run."""
    overrides = [
        f"output={stage.exchange.output}", "rollout.colocated=true", "parallel.phase_offload=true", "evaluate_every=0",
        f"rollout.episodes={EPISODES}", "rollout.max_turns=3", "rollout.max_action_tokens=4",
        "rollout.shard_seconds=0.05", "batching.token_budget=256",
    ]  # fmt: skip

    async def both() -> None:
        process = RolloutWorker(load_config(None, overrides), ShortTask(), stage.engine)
        playing = asyncio.create_task(process.run())
        try:
            await asyncio.wait_for(trainer(), 60)
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(both())


def test_it_rests_once_for_each_version_and_says_what_that_gave_back(stage: Stage) -> None:
    async def trainer() -> None:
        for version in range(3):
            stage.publish(version, version * EPISODES)
            found = await stage.until(lambda beat, v=version: (beat.state, beat.version) == ("asleep", v))
            assert stage.engine.asleep and found.recorded == (version + 1) * EPISODES and found.in_flight == 0
            assert (found.awake_bytes, found.asleep_bytes) == (1000, 10 + version)

    play(stage, trainer)
    assert stage.engine.told == ["rests 0", "serves 1", "rests 1", "serves 2", "rests 2"]


def test_it_rests_again_after_an_update_that_it_refused(stage: Stage) -> None:
    stage.engine.bad = {1}

    async def trainer() -> None:
        stage.publish(0, 0)
        await stage.until(lambda beat: beat.state == "asleep")
        stage.publish(1, EPISODES)
        while stage.engine.told[-2:] != ["refused 1", "rests 0"]:
            await asyncio.sleep(0.02)
        assert stage.exchange.rejection(1) is not None
        stage.engine.bad.clear()
        (stage.exchange.weights / "version-000002").mkdir()
        stage.exchange.write_progress(Progress(2, EPISODES))
        await stage.until(lambda beat: (beat.state, beat.version) == ("asleep", 2))

    play(stage, trainer)
    assert stage.engine.told == ["rests 0", "refused 1", "rests 0", "serves 2", "rests 2"]


def test_it_rests_after_weights_for_which_all_is_recorded(stage: Stage) -> None:
    """A trainer that lost its last iteration publishes it again, and would find the engine on the device."""

    async def trainer() -> None:
        for version in range(2):
            stage.publish(version, version * EPISODES)
            await stage.until(lambda beat, v=version: (beat.state, beat.version) == ("asleep", v))
        (stage.exchange.weights / "version-000001").rmdir()
        stage.exchange.write_progress(Progress(0, 0))
        await stage.until(lambda beat: (beat.state, beat.version) == ("asleep", 0))
        assert stage.engine.asleep

    play(stage, trainer)
    assert stage.engine.told[-2:] == ["serves 0", "rests 0"]


def test_a_server_that_cannot_leave_its_gpu_is_refused_at_the_start(versions: list[Path]) -> None:
    class Wakeful(CountingReplica):
        async def describe(self) -> Description:
            return Description("0", 64, can_sleep=False)

    for colocated in (True, False):
        config = load_config(None, [f"rollout.colocated={colocated}", "parallel.phase_offload=true"])
        replica = Wakeful("r", versions[0])
        if colocated:
            with pytest.raises(ConfigError, match="enable-sleep-mode"):
                rollout_engines._vllm_engine(config, [replica], versions[0], 0)
            assert not replica.up, "closed"
        else:
            rollout_engines._vllm_engine(config, [replica], versions[0], 0).close()


@pytest.mark.parametrize("engine", ["embedded", "vllm", "vllm_http"])
def test_every_engine_may_take_turns_with_the_trainer(engine: str) -> None:
    chosen = load_config(None, ["rollout.colocated=true", "parallel.phase_offload=true", f"rollout.engine={engine}"])
    assert chosen.rollout.has_process and chosen.rollout.staleness == 0
