"""When the engine of a colocated rollout process sleeps, and what its heartbeat says.

The worker's loop and the files are real, the engine only counts.
"""

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
from tests.unit.engines.counting_replica import CountingReplica, versions
from tests.unit.episodes.counting import HEADER, CountingEngine, counting_environment, specs_of

__all__ = ["versions"]
EPISODES = 4


@dataclass(frozen=True)
class FakeVocabulary:
    fingerprint: str = "none"


class ShortTask:
    """Episodes of one or two turns."""

    vocabulary = FakeVocabulary()

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
    """Lists its updates and sleeps; is awake after an update, also after one that it refuses."""

    context_limit = 256

    def __init__(self) -> None:
        super().__init__(jitter=0.02)
        self.events: list[str] = []
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
            self.events.append(f"refused {version}")
            raise EngineVersionError("other weights", file=weights)
        self.version = version
        self.events.append(f"serves {version}")

    async def sleep(self) -> Footprint:
        assert not self.at_once, "sent to sleep during a call"
        self.asleep = True
        self.events.append(f"sleeps {self.version}")
        return Footprint(1000, 10 + self.version)


@dataclass
class FakeTrainer:
    """A run directory in which the test acts as the trainer."""

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
        raise AssertionError(f"condition never met: {found}, {self.engine.events}")


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    return FakeTrainer(Exchange(tmp_path))


def play(trainer: FakeTrainer, script) -> None:
    """Run the rollout worker beside a script of the trainer, whose end ends the run."""
    overrides = [
        f"output={trainer.exchange.output}", "rollout.colocated=true", "parallel.phase_offload=true",
        "evaluate_every=0", f"rollout.episodes={EPISODES}", "rollout.max_turns=3", "rollout.max_action_tokens=4",
        "rollout.shard_seconds=0.05", "batching.token_budget=256",
    ]  # fmt: skip

    async def both() -> None:
        worker = RolloutWorker(load_config(None, overrides), ShortTask(), trainer.engine)
        playing = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(script(), 60)
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(both())


def test_it_sleeps_once_for_each_version_and_reports_the_memory(trainer: FakeTrainer) -> None:
    async def script() -> None:
        for version in range(3):
            trainer.publish(version, version * EPISODES)
            found = await trainer.until(lambda beat, v=version: (beat.state, beat.version) == ("asleep", v))
            assert trainer.engine.asleep and found.recorded == (version + 1) * EPISODES and found.in_flight == 0
            assert (found.awake_bytes, found.asleep_bytes) == (1000, 10 + version)

    play(trainer, script)
    assert trainer.engine.events == ["sleeps 0", "serves 1", "sleeps 1", "serves 2", "sleeps 2"]


def test_it_sleeps_again_after_an_update_that_it_refused(trainer: FakeTrainer) -> None:
    trainer.engine.bad = {1}

    async def script() -> None:
        trainer.publish(0, 0)
        await trainer.until(lambda beat: beat.state == "asleep")
        trainer.publish(1, EPISODES)
        while trainer.engine.events[-2:] != ["refused 1", "sleeps 0"]:
            await asyncio.sleep(0.02)
        assert trainer.exchange.rejection(1) is not None
        trainer.engine.bad.clear()
        (trainer.exchange.weights / "version-000002").mkdir()
        trainer.exchange.write_progress(Progress(2, EPISODES))
        await trainer.until(lambda beat: (beat.state, beat.version) == ("asleep", 2))

    play(trainer, script)
    assert trainer.engine.events == ["sleeps 0", "refused 1", "sleeps 0", "serves 2", "sleeps 2"]


def test_it_sleeps_after_an_update_to_weights_whose_episodes_are_all_recorded(trainer: FakeTrainer) -> None:
    """A trainer that lost its last iteration publishes it again, and needs the device."""

    async def script() -> None:
        for version in range(2):
            trainer.publish(version, version * EPISODES)
            await trainer.until(lambda beat, v=version: (beat.state, beat.version) == ("asleep", v))
        (trainer.exchange.weights / "version-000001").rmdir()
        trainer.exchange.write_progress(Progress(0, 0))
        await trainer.until(lambda beat: (beat.state, beat.version) == ("asleep", 0))
        assert trainer.engine.asleep

    play(trainer, script)
    assert trainer.engine.events[-2:] == ["serves 0", "sleeps 0"]


def test_a_server_that_cannot_release_its_gpu_is_refused_at_the_start(versions: list[Path]) -> None:
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
