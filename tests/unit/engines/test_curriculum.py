"""Levels that rise with success, and starts that are spread, shared by a group, and never past the end."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.engines.curriculum import Curriculum, StaggeredStart, stagger, staggered
from megatron_rl.engines.episode_state import EpisodeLimits
from megatron_rl.engines.episodes import EpisodeSpec, play_episodes
from megatron_rl.engines.player import PlayLimits, play
from megatron_rl.engines.tasks import FrozenLakeTask
from megatron_rl.errors import ConfigError
from tests.unit.engines.counting import (
    STOP,
    CountingEngine,
    CountingEnvironment,
    counting_environment,
    specs_of,
)


def level(number, length):
    return (replace(specs_of([length])[0], trajectory_id=f"level{number}-{i}") for i in itertools.count())


def result(curriculum, success, outcome="completed"):
    spec = next(curriculum)
    (record,) = play_episodes(CountingEngine(), counting_environment, [spec], max_turns=9, max_action_tokens=6,
                              context_limit=300)  # fmt: skip
    curriculum.finished(replace(record, outcome=outcome, metadata={"success": success}))
    return spec.trajectory_id


def test_level_rises_after_a_window_of_success_and_not_before():
    curriculum = Curriculum([level(0, 1), level(1, 2)], promote_at=0.75, window=4)
    for success in (True, True, True):
        result(curriculum, success)
    assert (curriculum.level, curriculum.success) == (0, 1.0)
    result(curriculum, False)
    assert curriculum.level == 1 and np.isnan(curriculum.success)
    assert result(curriculum, True).startswith("level1")
    for _ in range(8):
        result(curriculum, True)
    assert curriculum.level == 1


def test_failures_keep_the_level_and_old_ones_are_forgotten():
    curriculum = Curriculum([level(0, 1), level(1, 2)], promote_at=1.0, window=3)
    for success in (True, True, False, True, True):
        result(curriculum, success)
    assert curriculum.level == 0
    result(curriculum, True)
    assert curriculum.level == 1


@pytest.mark.parametrize("outcome", ["environment_error", "aborted"])
def test_episodes_that_were_not_the_policys_fault_do_not_count(outcome):
    curriculum = Curriculum([level(0, 1), level(1, 2)], promote_at=0.5, window=2)
    for _ in range(4):
        result(curriculum, True, outcome)
    assert curriculum.level == 0 and np.isnan(curriculum.success)


def test_results_of_an_earlier_level_do_not_count():
    curriculum = Curriculum([level(0, 1), level(1, 2), level(2, 3)], promote_at=0.5, window=1)
    late = next(curriculum)
    result(curriculum, True)
    (record,) = play_episodes(CountingEngine(), counting_environment, [late], max_turns=9, max_action_tokens=6,
                              context_limit=300)  # fmt: skip
    curriculum.finished(replace(record, metadata={"success": True}))
    assert curriculum.level == 1


def test_player_follows_the_curriculum():
    played = []
    curriculum = Curriculum([level(0, 1), itertools.islice(level(1, 2), 20)], promote_at=1.0, window=10)

    async def told(trajectory):
        played.append(trajectory.trajectory_id.partition("-")[0])
        curriculum.finished(trajectory)

    limits = PlayLimits(EpisodeLimits(max_turns=9, max_action_tokens=6, context_limit=300), concurrency=4)
    asyncio.run(play(CountingEngine(), counting_environment, curriculum, limits, told))
    counts = Counter(played)
    assert counts["level1"] == 20
    assert 10 <= counts["level0"] <= 10 + 3


@pytest.mark.parametrize("change", [{"level": 2}, {"level": -1}, {"promote_at": 1.5}, {"window": 0}])
def test_curriculum_out_of_range_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Curriculum([[], []], **change)
    with pytest.raises(ConfigError):
        Curriculum([])


def test_start_turns_are_spread_evenly_and_shared_by_a_group():
    specs = [EpisodeSpec(f"t{i}", f"p{i // 4}", f"g{i // 4}") for i in range(4000)]
    turns = {}
    for spec in stagger(specs, 3, seed=1):
        assert turns.setdefault(spec.group_id, spec.options["start_turn"]) == spec.options["start_turn"]
    counts = Counter(turns.values())
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 200
    assert turns != {s.group_id: s.options["start_turn"] for s in stagger(specs, 3, seed=2)}
    backwards = {s.group_id: s.options["start_turn"] for s in stagger(reversed(specs), 3, seed=1)}
    assert backwards == turns


def test_staggered_episode_starts_where_random_play_led_and_says_so():
    """The real lake: the first observation is that of the state after the moves, equal for the whole group."""
    task = FrozenLakeTask(evaluation_maps=40)
    specs = [replace(s, trajectory_id=f"{s.trajectory_id}-{i}") for s in task.evaluation_specs(40) for i in range(2)]
    specs = [replace(s, options={**s.options}) for s in stagger(specs, 4)]
    plain, moved = {}, {}
    for spec in specs:
        env = staggered(task.make_env)(spec)
        first = tuple(env.reset(spec.seed, spec.options))
        assert moved.setdefault(spec.group_id, first) == first
        plain[spec.group_id] = tuple(task.make_env(spec).reset(spec.seed, spec.options))
        assert env.step(env.valid_actions()[0]).info["start_turn"] <= spec.options["start_turn"]
    assert sum(moved[group] != plain[group] for group in moved) > 15
    stayed = {s.group_id for s in specs if s.options["start_turn"] == 0}
    assert all(moved[group] == plain[group] for group in stayed)


def test_record_holds_the_start_turn():
    specs = list(stagger(specs_of([9] * 12), 3))
    records = play_episodes(CountingEngine(), staggered(counting_environment), specs, max_turns=2, max_action_tokens=6,
                            context_limit=300)  # fmt: skip
    assert [r.metadata["start_turn"] for r in records] == [s.options["start_turn"] for s in specs]
    assert len({r.metadata["start_turn"] for r in records}) > 1


def test_start_is_before_the_end_of_a_short_episode():
    env = StaggeredStart(CountingEnvironment(1, length=3), turns=7, seed=0)
    env.reset(0)
    result = env.step([41, STOP])
    assert (result.terminated, result.info["start_turn"]) == (True, 2)


def test_random_environment_that_ends_again_starts_afresh():
    class Shrinking(CountingEnvironment):
        def reset(self, seed, options=None):
            self.length -= 1
            return super().reset(seed, options)

    inner = Shrinking(1, length=5)
    env = StaggeredStart(inner, turns=7, seed=0)
    first = env.reset(0)
    assert first == CountingEnvironment(1, 9).reset(0)
    assert inner.turn == 0
    assert env.step([41, STOP]).info["start_turn"] == 0
    env.close()
    assert inner.closed == 1
