"""The concurrent runner: records that do not depend on which episodes run beside them, and episodes that fail alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import parse_config
from megatron_rl.config.rollout import RepetitionConfig
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.local_async import LocalAsyncEngine
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.base import StepResult, ToolError
from megatron_rl.environments.frozen_lake import FrozenLakeTask
from megatron_rl.episodes.concurrent import PlayLimits, play
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes
from megatron_rl.errors import (
    ConfigError,
    EngineAnswerError,
    EngineUnavailableError,
    EngineVersionError,
    RolloutError,
)
from megatron_rl.rollouts import read_batch, validate, write_shard
from tests.unit.episodes.counting import (
    HEADER,
    MODEL,
    STOP,
    CountingEngine,
    CountingEnvironment,
    counting_environment,
    routes_of,
    specs_of,
)
from tests.unit.rollouts.records import assert_same
from tests.waiting import wait_until

EPISODE = EpisodeLimits(max_turns=40, max_action_tokens=6, context_limit=130)
LIMITS = PlayLimits(EPISODE, concurrency=16, engine_pause=0.0)


def played(engine, make_env, specs, limits=LIMITS, **options):
    """All trajectories, in the order they finished."""
    finished = []

    async def keep(trajectory):
        finished.append(trajectory)

    asyncio.run(play(engine, make_env, specs, limits, keep, **options))
    return finished


def timeless(trajectory):
    return replace(trajectory, metadata={k: v for k, v in trajectory.metadata.items() if k != "seconds"})


def assert_fit(trajectories, tmp_path, version=0):
    """They pass the validation before training, routes included."""
    write_shard(tmp_path, HEADER, [t for t in trajectories if len(t.tokens)])
    kept = validate(read_batch(tmp_path), expected=MODEL, replay=True, current_version=version, temperature=1.0)
    for trajectory in trajectories:
        assert len(trajectory.tokens) == 0 or trajectory.action_mask[-1] or len(trajectory.turn_rewards) == 0
        if trajectory.routes is not None:
            np.testing.assert_array_equal(trajectory.routes, routes_of(trajectory.tokens.tolist()))
    return kept


def test_thousand_episodes_of_any_length_are_those_of_lock_step(tmp_path):
    """Lengths 1 to 60 against 40 turns and 130 tokens, so that every ending occurs, in whatever order they finish."""
    lengths = np.random.default_rng(0).geometric(0.12, 1000).clip(1, 60).tolist()
    specs = specs_of(lengths)
    specs = [replace(s, options={**s.options, "ending": ("terminated", "truncated")[i % 3 == 0]})
             for i, s in enumerate(specs)]  # fmt: skip
    engine = CountingEngine(jitter=0.002)
    finished = played(engine, counting_environment, specs, replace(LIMITS, concurrency=64))
    assert engine.most_at_once <= 64
    assert [t.trajectory_id for t in finished] != [s.trajectory_id for s in specs]
    expected = {t.trajectory_id: t for t in play_episodes(CountingEngine(), counting_environment, specs, EPISODE)}
    assert len(finished) == len(expected) == 1000
    for trajectory in finished:
        assert_same(timeless(trajectory), timeless(expected[trajectory.trajectory_id]))
    outcomes = Counter(t.outcome for t in finished)
    assert set(outcomes) == {"completed", "truncated_turns", "truncated_length"}
    assert assert_fit(finished, tmp_path).report.kept == 1000


def test_concurrency_is_reached_and_never_exceeded():
    alive, most = 0, 0

    class Counted(CountingEnvironment):
        def reset(self, seed, options=None):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return super().reset(seed, options)

    async def leave(_trajectory):
        nonlocal alive
        alive -= 1

    limits = replace(LIMITS, concurrency=5, environment_threads=1)
    specs = specs_of([3] * 30)
    asyncio.run(play(CountingEngine(0.001), lambda s: Counted(s.options["name"], 3), specs, limits, leave))
    assert (most, alive) == (5, 0)


def test_slow_receiver_holds_back_new_episodes():
    """Episodes started and not yet received never exceed the number of slots, though the source is endless."""
    started, taken, worst = 0, 0, 0

    def endless():
        nonlocal started
        for spec in map(lambda i: specs_of([1])[0], itertools.count()):
            started += 1
            yield spec

    async def slow(_trajectory):
        nonlocal taken, worst
        worst = max(worst, started - taken)
        await asyncio.sleep(0.005)
        taken += 1

    async def watch():
        limits = replace(LIMITS, concurrency=4)
        task = asyncio.create_task(play(CountingEngine(), counting_environment, endless(), limits, slow))
        while taken < 20:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(watch())
    assert worst <= 4


def test_source_may_wait_for_what_has_finished():
    """Two at a time, each pair only after the pair before: the source waits for the receiver."""
    log = []
    specs = specs_of([2] * 8)

    async def drip():
        for i, spec in enumerate(specs):
            while len(log) < i - i % 2:
                await asyncio.sleep(0.001)
            yield spec

    async def keep(trajectory):
        log.append(int(trajectory.trajectory_id[1:]) // 2)

    asyncio.run(play(CountingEngine(0.01), counting_environment, drip(), LIMITS, keep))
    assert log == [0, 0, 1, 1, 2, 2, 3, 3]


def test_cancelling_stops_everything_and_closes_environments():
    made = []

    def make(spec):
        made.append(counting_environment(spec))
        return made[-1]

    async def never(_trajectory):
        raise AssertionError("nothing finishes")

    async def watch():
        specs = (specs_of([10**6])[0] for _ in itertools.count())
        limits = replace(LIMITS, episode=replace(EPISODE, max_turns=10**6, context_limit=10**7))
        task = asyncio.create_task(play(CountingEngine(0.01), make, specs, limits, never))
        while len(made) < 16:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watch())
    wait_until(lambda: [env.closed for env in made] == [1] * 16)


class Faulty(CountingEnvironment):
    """Does `fault` instead of its second step (or of its reset)."""

    def __init__(self, fault, at=2):
        super().__init__(1, 5)
        self._fault, self._at = fault, at

    def reset(self, seed, options=None):
        return self._fault() if self._at == 0 else super().reset(seed, options)

    def step(self, action_tokens):
        return self._fault() if self.turn + 1 == self._at else super().step(action_tokens)


def raising(error):
    def fault():
        raise error

    return fault


def showing(**changes):
    return lambda: StepResult(**{"observation": [1], "reward": 0.0, "terminated": False, "truncated": False} | changes)


FAULTS = {
    "raises": (raising(ValueError("broken")), "ValueError: broken"),
    "end of an iterator": (raising(StopIteration()), "StopIteration"),
    "exit": (raising(SystemExit(3)), "SystemExit: 3"),
    "time-out of its own": (raising(TimeoutError("socket")), "TimeoutError: socket"),
    "cancellation": (raising(asyncio.CancelledError()), "CancelledError"),
    "text": (showing(observation="a wall"), "not text"),
    "bytes": (showing(observation=b"ab"), "not text"),
    "nothing": (showing(observation=None), "not text"),
    "real numbers": (showing(observation=[0.5]), "not text"),
    "nested": (showing(observation=[[1], [2]]), "not text"),
    "ragged": (showing(observation=[[1], [2, 3]]), "ValueError"),
    "negative": (showing(observation=[3, -1]), "not text"),
    "no result": (lambda: ([1], 0.0, False, False, {}), "AttributeError"),
    "reward NaN": (showing(reward=float("nan")), "reward is not finite"),
    "reward text": (showing(reward="much"), "could not convert"),
    "unknown outcome": (showing(info={"outcome": "bored"}), "bored"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_environment_ends_its_own_episode_only(name, tmp_path):
    fault, reason = FAULTS[name]
    specs = specs_of([4] * 6)
    broken = specs[2].trajectory_id
    finished = played(
        CountingEngine(),
        lambda spec: Faulty(fault) if spec.trajectory_id == broken else counting_environment(spec),
        specs,
    )
    by_id = {t.trajectory_id: t for t in finished}
    assert Counter(t.outcome for t in finished) == {"completed": 5, "environment_error": 1}
    record = by_id[broken]
    assert record.outcome == "environment_error"
    assert reason in record.metadata["error"]
    assert (record.terminated, record.truncated, record.boundary_tokens) == (False, False, None)
    assert record.turn_rewards.tolist() == [0.125, 0.0]
    assert_fit(finished, tmp_path)


@pytest.mark.parametrize("fault", [raising(OSError("no lake")), lambda: None, lambda: [], lambda: "text"])
def test_environment_that_cannot_start(fault):
    (record,) = played(CountingEngine(), lambda _spec: Faulty(fault, at=0), specs_of([1]))
    assert record.outcome == "environment_error"
    assert len(record.tokens) == 0
    assert record.metadata["error"]


def test_environment_that_cannot_be_made():
    (record,) = played(CountingEngine(), lambda _spec: 1 / 0, specs_of([1]))
    assert record.metadata["error"] == "ZeroDivisionError: division by zero"


def test_broken_tool_is_an_outcome_of_its_own_and_terminates(tmp_path):
    (record,) = played(CountingEngine(), lambda _spec: Faulty(raising(ToolError("disk full"))), specs_of([1]))
    assert (record.outcome, record.terminated, record.truncated) == ("tool_error", True, False)
    assert record.metadata["error"] == "ToolError: disk full"
    assert_fit([record], tmp_path)


def test_environment_names_the_outcome_of_its_last_step():
    finish = showing(terminated=True, info={"outcome": "finished", "success": True})
    (record,) = played(CountingEngine(), lambda _spec: Faulty(finish), specs_of([1]))
    assert (record.outcome, record.terminated, record.metadata["success"]) == ("finished", True, True)


@pytest.mark.parametrize("at", [0, 2])
def test_hanging_environments_delay_nobody(at, tmp_path):
    """Six hang in two threads; the others finish, and threads that return after all close their environment."""
    release, made = threading.Event(), []

    def make(spec):
        made.append(
            Faulty(lambda: release.wait(10) and [1], at=at) if spec.seed % 2 else CountingEnvironment(spec.seed, 4)
        )
        return made[-1]

    limits = replace(LIMITS, environment_threads=2, step_timeout=0.4)
    begin = time.monotonic()
    finished = played(CountingEngine(), make, specs_of([4] * 12), limits)
    assert time.monotonic() - begin < 8
    assert Counter(t.outcome for t in finished) == {"completed": 6, "environment_error": 6}
    hung = [t for t in finished if t.outcome == "environment_error"]
    assert all("EnvironmentHang: no answer within 0.4 s" in t.metadata["error"] for t in hung)
    assert sum(env.closed for env in made) == 6
    release.set()
    wait_until(lambda: [env.closed for env in made] == [1] * 12)
    assert_fit(finished, tmp_path)


def test_too_many_hanging_environments_are_an_error():
    release = threading.Event()
    limits = replace(LIMITS, environment_threads=2, step_timeout=0.2, max_stuck_environments=3)
    try:
        with pytest.raises(RolloutError, match="max_stuck_environments"):
            played(CountingEngine(), lambda _spec: Faulty(lambda: release.wait(10)), specs_of([4] * 12), limits)
    finally:
        release.set()


def test_environment_whose_close_fails_or_hangs_is_recorded():
    class Stubborn(CountingEnvironment):
        def close(self):
            if self.name:
                time.sleep(0.8)
            raise OSError("no")

    limits = replace(LIMITS, step_timeout=0.4)
    finished = played(CountingEngine(), lambda s: Stubborn(s.options["name"], 1), specs_of([1, 1]), limits)
    assert [t.outcome for t in finished] == ["completed"] * 2


class Flaky(CountingEngine):
    """The first `failures` calls on each prompt go wrong, after `before` seconds."""

    def __init__(self, failures, error=None, before=0.0):
        super().__init__()
        self._failures, self._error, self._before = failures, error, before
        self.calls_on: Counter[tuple[int, ...]] = Counter()

    async def agenerate(self, prompt, max_new_tokens, stop_tokens, greedy=False):
        self.calls_on[tuple(prompt)] += 1
        if self.calls_on[tuple(prompt)] <= self._failures:
            await asyncio.sleep(self._before)
            if self._error is not None:
                raise self._error
        return await super().agenerate(prompt, max_new_tokens, stop_tokens, greedy)


@pytest.mark.parametrize("engine", [Flaky(2, EngineUnavailableError("503")), Flaky(1, before=5.0)])
def test_engine_call_is_made_again_and_recorded_once(engine):
    specs = specs_of([3, 2])
    limits = replace(LIMITS, engine_timeout=0.4)
    finished = played(engine, counting_environment, specs, limits)
    expected = {t.trajectory_id: t for t in play_episodes(CountingEngine(), counting_environment, specs, EPISODE)}
    for record in finished:
        assert_same(timeless(record), timeless(expected[record.trajectory_id]))
    assert set(engine.calls_on.values()) == {engine._failures + 1}


@pytest.mark.parametrize(
    ("engine", "calls", "reason"),
    [
        (Flaky(99, EngineUnavailableError("503")), 3, "EngineUnavailableError: 503"),
        (Flaky(99, EngineVersionError("old weights")), 1, "EngineVersionError: old weights"),
        (Flaky(99, before=5.0), 3, "nothing after 0.4 s"),
    ],
)
def test_engine_that_does_not_answer_aborts_the_episode(engine, calls, reason):
    limits = replace(LIMITS, engine_timeout=0.4, engine_retries=2)
    (record,) = played(engine, counting_environment, specs_of([3]), limits)
    assert (record.outcome, record.terminated, record.truncated) == ("aborted", False, False)
    assert reason in record.metadata["error"]
    assert list(engine.calls_on.values()) == [calls]
    assert not record.action_mask.any()


def test_episode_aborted_midway_ends_with_its_last_action(tmp_path):
    class Dies(CountingEngine):
        async def agenerate(self, *call):
            if self.calls == 2:
                raise EngineVersionError("old weights")
            return await super().agenerate(*call)

    (record,) = played(Dies(), counting_environment, specs_of([9]))
    (whole,) = play_episodes(CountingEngine(), counting_environment, specs_of([9]), EPISODE)
    assert record.outcome == "aborted"
    assert len(record.turn_rewards) == 2
    assert record.tokens.tolist() == whole.tokens[: len(record.tokens)].tolist()
    assert record.turn_id[-1] == 1
    assert_fit([record], tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32)},
        {"tokens": np.full(9, 41, np.int32), "logprobs": np.zeros(9, np.float32)},
        {"logprobs": np.zeros(1, np.float32)},
        {"logprobs": np.full(2, np.nan, np.float32)},
        {"routes": np.zeros((2, 2, 2), np.uint8)},
        {"routes": np.zeros((2, 4, 2), np.uint8)},
    ],
)
def test_generation_that_cannot_be_recorded_aborts_the_episode(damage):
    class Damaged(CountingEngine):
        def sample(self, prompt, limit, stops):
            sound = super().sample(prompt, limit, stops)
            two = replace(sound, tokens=np.array([41, STOP], np.int32), logprobs=np.zeros(2, np.float32),
                          routes=routes_of([*prompt, 41, STOP]))  # fmt: skip
            return replace(two, **damage)

    (record,) = played(Damaged(), counting_environment, specs_of([3]))
    assert record.outcome == "aborted"
    assert "EngineAnswerError" in record.metadata["error"]
    with pytest.raises(EngineAnswerError):
        play_episodes(Damaged(), counting_environment, specs_of([3]), EPISODE)


def test_faults_of_the_program_are_not_swallowed():
    with pytest.raises(RuntimeError, match="bug"):
        played(Flaky(1, RuntimeError("bug")), counting_environment, specs_of([2] * 20))

    taken = []

    async def refuse_one(trajectory):
        taken.append(trajectory)
        if len(taken) == 5:
            raise OSError("disk full")

    endless = (specs_of([2])[0] for _ in itertools.count())
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(play(CountingEngine(), counting_environment, endless, LIMITS, refuse_one))


class Interrupting(CountingEngine):
    """Every call ends after one token, whether the action needs more or not, and new weights arrive."""

    async def agenerate(self, prompt, max_new_tokens, stop_tokens, greedy=False):
        whole = await super().agenerate(prompt, max_new_tokens, stop_tokens, greedy)
        self.version += 1
        if len(whole.tokens) == 1:
            return replace(whole, interrupted=True)
        routes = routes_of([*prompt, int(whole.tokens[0])])
        return replace(whole, tokens=whole.tokens[:1], logprobs=whole.logprobs[:1], routes=routes, interrupted=True)


@pytest.mark.parametrize("context_limit", [130, 25])
def test_interrupted_action_goes_on_from_its_exact_prefix(context_limit, tmp_path):
    """As if it had been sampled in one call, but for the version of each token."""
    specs = specs_of([6] * 8)
    episode = replace(EPISODE, context_limit=context_limit)
    engine = Interrupting()
    finished = played(engine, counting_environment, specs, replace(LIMITS, episode=episode))
    expected = {t.trajectory_id: t for t in play_episodes(CountingEngine(), counting_environment, specs, episode)}
    for record in finished:
        whole = expected[record.trajectory_id]
        versions = record.version[record.action_mask]
        assert (np.diff(versions) > 0).all()
        assert record.metadata["interruptions"] == record.action_mask.sum() - len(record.turn_rewards)
        metadata = record.metadata | {"interruptions": 0}
        assert_same(timeless(replace(record, version=whole.version, metadata=metadata)), timeless(whole))
    assert sum(t.metadata["interruptions"] for t in finished) > 8
    assert_fit(finished, tmp_path, version=engine.version)


def test_prefix_routed_differently_under_new_weights_is_counted():
    class Moved(CountingEngine):
        def sample(self, prompt, limit, stops):
            made = super().sample(prompt, limit, stops)
            return replace(made, routes=(made.routes + (len(prompt) > 2)) % 8)

    (record,) = played(Moved(), counting_environment, specs_of([2]))
    (whole,) = played(CountingEngine(), counting_environment, specs_of([2]))
    held = int(np.flatnonzero(record.turn_id == 0)[-1])
    assert record.metadata["route_conflicts"] == 2 * held
    np.testing.assert_array_equal(record.routes[:, :held], whole.routes[:, :held])


@pytest.mark.parametrize("turns", [0, 2])
def test_time_out_keeps_what_was_seen_at_the_boundary(turns, tmp_path):
    class Stalls(CountingEngine):
        async def agenerate(self, *call):
            if self.calls == turns:
                await asyncio.sleep(20)
            return await super().agenerate(*call)

    limits = replace(LIMITS, episode_timeout=0.8, engine_timeout=10)
    (record,) = played(Stalls(), counting_environment, specs_of([9]), limits)
    (whole,) = play_episodes(CountingEngine(), counting_environment, specs_of([9]), EPISODE)
    assert (record.outcome, record.terminated, record.truncated) == ("timeout", False, True)
    assert len(record.turn_rewards) == turns
    n = len(record.tokens)
    assert record.tokens.tolist() == whole.tokens[:n].tolist()
    seen = n + int(np.argmax(whole.turn_id[n:] >= 0))
    assert record.boundary_tokens.tolist() == (whole.tokens[n:seen].tolist() if turns else [])
    assert_fit([record], tmp_path)


def test_time_out_amid_an_action_saw_nothing_new(tmp_path):
    class Stalls(Interrupting):
        async def agenerate(self, prompt, *call):
            if len(prompt) > 2:
                await asyncio.sleep(20)
            return await super().agenerate(prompt, *call)

    (name,) = [i for i in range(20) if len(CountingEngine().sample([i % 30, 30 + i // 30], 6, [STOP]).tokens) > 3][:1]
    limits = replace(LIMITS, episode_timeout=0.8)
    (record,) = played(Stalls(), lambda _spec: CountingEnvironment(name, 5), specs_of([5]), limits)
    assert (record.outcome, record.truncated, record.boundary_tokens.tolist()) == ("timeout", True, [])
    assert record.turn_id.tolist() == [-1, -1, 0]
    assert_fit([record], tmp_path, version=9)


def test_time_that_a_step_used_up_is_noticed_after_it(tmp_path):
    class Slow(CountingEnvironment):
        def step(self, action_tokens):
            time.sleep(0.4)
            return super().step(action_tokens)

    limits = replace(LIMITS, episode_timeout=0.6, step_timeout=10.0)
    (record,) = played(CountingEngine(), lambda _spec: Slow(0, 9), specs_of([9]), limits)
    (whole,) = play_episodes(CountingEngine(), counting_environment, specs_of([9]), EPISODE)
    turns = len(record.turn_rewards)
    assert (record.outcome, record.truncated) == ("timeout", True)
    assert 1 <= turns <= 2
    following = whole.tokens[len(record.tokens) :][: len(record.boundary_tokens)]
    assert record.boundary_tokens.tolist() == following.tolist() == [following[0]] * (1 + turns % 3)
    assert record.turn_rewards.tolist() == whole.turn_rewards[:turns].tolist()
    assert_fit([record], tmp_path)


def test_episode_that_its_environment_keeps_waiting_is_an_environment_error():
    limits = replace(LIMITS, episode_timeout=0.8, step_timeout=None)
    release = threading.Event()
    (record,) = played(CountingEngine(), lambda _spec: Faulty(lambda: release.wait(10)), specs_of([5]), limits)
    release.set()
    assert record.outcome == "environment_error"
    assert "EnvironmentHang" in record.metadata["error"]


class Repeating(CountingEngine):
    """Always samples the same tokens."""

    def __init__(self, *tokens):
        super().__init__()
        self._tokens = tokens

    def sample(self, prompt, limit, stops):
        tokens = list(self._tokens)[:limit]
        logprobs = np.zeros(len(tokens), np.float32)
        return replace(super().sample(prompt, 1, stops), tokens=np.asarray(tokens, np.int32), logprobs=logprobs,
                       routes=routes_of([*prompt, *tokens]))  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "action", "turns"),
    [
        (RepetitionConfig(identical_actions=3), (41, STOP), 3),
        (RepetitionConfig(ngram=1, ngram_times=4), (41, 42, 42, 42, 42, STOP), 1),
        (RepetitionConfig(ngram=2, ngram_times=2), (40, 41, 42, 41, 42), 1),
        (RepetitionConfig(ngram=1, ngram_times=4), (41, 42, 42, 42, STOP), None),
        (RepetitionConfig(ngram=1, ngram_times=2), (42, 42, 41, STOP), None),
        (RepetitionConfig(), (42, 42, 42, 42, 42, 42), None),
    ],
)
def test_repetition_is_cut_after_the_turn_that_shows_it(rule, action, turns, tmp_path):
    limits = replace(LIMITS, episode=replace(EPISODE, repetition=rule))
    (record,) = played(Repeating(*action), counting_environment, specs_of([7]), limits)
    if turns is None:
        assert (record.outcome, len(record.turn_rewards)) == ("completed", 7)
        return
    assert (record.outcome, record.truncated, len(record.turn_rewards)) == ("repetition", True, turns)
    assert record.boundary_tokens.tolist() == [sum(action) % 40] * (1 + turns % 3)
    assert_fit([record], tmp_path)


def test_different_actions_are_no_repetition():
    limits = replace(LIMITS, episode=replace(EPISODE, repetition=RepetitionConfig(identical_actions=2)))
    finished = played(CountingEngine(), counting_environment, specs_of([12] * 10), limits)
    for record in finished:
        actions = [record.tokens[record.turn_id == k].tolist() for k in range(len(record.turn_rewards))]
        repeated = [a == b for a, b in itertools.pairwise(actions)]
        assert not any(repeated[:-1])
        assert len(actions) == 12 or repeated[-1]
        assert record.outcome == ("completed" if len(actions) == 12 else "repetition")
    assert len({record.outcome for record in finished}) == 2


def test_first_observation_without_room_is_coded_not_fatal(tmp_path):
    limits = replace(LIMITS, episode=replace(EPISODE, context_limit=2))
    finished = played(CountingEngine(), counting_environment, specs_of([3, 3]), limits)
    assert [t.outcome for t in finished] == ["truncated_length"] * 2
    assert all("no room" in t.metadata["error"] for t in finished)
    assert assert_fit(finished, tmp_path).report.decisions == 0


@pytest.mark.parametrize(
    "change",
    [{"concurrency": 0}, {"engine_retries": -1}, {"episode_timeout": 0.0}, {"environment_threads": 0}],
)
def test_limits_out_of_range_are_refused(change):
    (name,) = change
    with pytest.raises(ConfigError, match=name) as refused:
        replace(LIMITS, **change)
    assert refused.value.setting == (None if name == "environment_threads" else f"rollout.{name}")


@pytest.mark.parametrize("change", [{"identical_actions": -1}, {"ngram": -1}, {"ngram_times": 1}])
def test_repetition_rules_out_of_range_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        parse_config({"rollout": {"repetition": change}})


def test_limits_are_those_of_the_configuration():
    names = ("episode_timeout", "step_timeout", "engine_timeout", "engine_retries")
    chosen = {"max_turns": 7, "max_action_tokens": 5, "repetition": {"ngram": 3}}
    rollout = parse_config({"rollout": chosen | {name: 9 for name in names}}).rollout
    limits = PlayLimits.of(rollout, context_limit=70, concurrency=40)
    assert limits.episode == EpisodeLimits(7, 5, 70, RepetitionConfig(ngram=3))
    assert [getattr(limits, name) for name in names] == [9] * 4
    assert (limits.concurrency, limits.environment_threads) == (40, 32)
    assert PlayLimits.of(parse_config({}).rollout, 70, 1).engine_timeout is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    shape = TinyShape(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, moe_hidden_size=16)
    write_tiny_checkpoint(path, FrozenLakeTask().vocabulary, shape, seed=3)
    return path


def test_real_model_greedy_plays_as_in_lock_step(checkpoint, tmp_path):
    """Batches differ, so log-probs agree up to float rounding; tokens and routes are the same."""
    task = FrozenLakeTask(evaluation_maps=8)
    specs = task.evaluation_specs(24)
    episode = EpisodeLimits(max_turns=6, max_action_tokens=3, context_limit=120)
    engine = LocalAsyncEngine(LocalEngine(checkpoint), max_batch=7)
    limits = replace(LIMITS, episode=episode, concurrency=10)
    specs = [replace(spec, trajectory_id=f"e{i}") for i, spec in enumerate(specs)]
    finished = played(engine, task.make_env, specs, limits, greedy=True)
    local = LocalEngine(checkpoint)
    expected = {t.trajectory_id: t for t in play_episodes(local, task.make_env, specs, episode, greedy=True)}
    for record in finished:
        other = expected[record.trajectory_id]
        np.testing.assert_allclose(record.logprobs, other.logprobs, atol=3e-6)
        np.testing.assert_array_equal(np.sort(record.routes, -1), np.sort(other.routes, -1))
        assert_same(timeless(replace(record, logprobs=other.logprobs, routes=other.routes)), timeless(other))
    header = local.header(task.vocabulary.fingerprint)
    write_shard(tmp_path, header, finished)
    checked = validate(
        read_batch(tmp_path), expected=header.fingerprint, replay=True, current_version=0, temperature=1.0
    )
    assert checked.report.kept == 24
