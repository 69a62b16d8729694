"""Levels that rise with success, and starts that are spread, shared by a group, and never past the end."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.environments.curriculum import START_SEED, START_TURN, Curriculum, StaggeredStart, TrainingTask
from megatron_rl.environments.frozen_lake import FrozenLakeTask
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes
from megatron_rl.errors import ConfigError
from tests.unit.episodes.counting import STOP, CountingEngine, CountingEnvironment, counting_environment


def result(level, success, outcome="completed"):
    return {"level": level, "success": success}, outcome


def told(curriculum, results):
    """Count results one by one; the levels after each."""
    levels = []
    for found in results:
        curriculum.count([found])
        levels.append(curriculum.level)
    return levels


def reference(results, levels, promote_at, window):
    """The level after each result: all results of the present level are looked at again, from the last rise on."""
    level, since, after = 0, 0, []
    for place in range(len(results)):
        own = [m["success"] for m, o in results[since : place + 1]
               if m["level"] == level and o not in ("environment_error", "aborted")]  # fmt: skip
        if len(own) >= window and sum(own[-window:]) >= promote_at * window and level < levels - 1:
            level, since = level + 1, place + 1
        after.append(level)
    return after


RESULTS = st.lists(
    st.builds(result, st.integers(0, 2), st.booleans(), st.sampled_from(["completed", "timeout", "aborted"])),
    max_size=60,
)


@given(RESULTS, st.integers(1, 3), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([1, 2, 4]))
def test_levels_rise_when_a_recount_of_everything_says_so(results, levels, promote_at, window):
    curriculum = Curriculum(levels, promote_at=promote_at, window=window)
    assert told(curriculum, results) == reference(results, levels, promote_at, window)


def test_level_rises_after_a_window_of_success_and_not_before():
    curriculum = Curriculum(2, promote_at=0.75, window=4)
    assert told(curriculum, [result(0, True)] * 3) == [0, 0, 0] and curriculum.success == 1.0
    assert told(curriculum, [result(0, False)]) == [1] and curriculum.success == 0.75
    assert told(curriculum, [result(1, True)] * 8) == [1] * 8, "there is no level beyond the last"


def test_a_batch_is_judged_by_its_end_and_rises_by_one_level_at_most():
    curriculum = Curriculum(3, promote_at=1.0, window=2)
    curriculum.count([result(0, True)] * 2 + [result(0, False)])
    assert (curriculum.level, curriculum.success) == (0, 0.5)
    curriculum.count([result(0, True)] * 9)
    assert (curriculum.level, curriculum.success) == (1, 1.0)
    curriculum.count([result(0, True)] * 9)
    assert (curriculum.level, curriculum.success) == (1, None), "what was played at an earlier level does not count"


@pytest.mark.parametrize("outcome", ["environment_error", "aborted"])
def test_episodes_that_were_not_the_policys_fault_do_not_count(outcome):
    curriculum = Curriculum(2, promote_at=0.5, window=2)
    assert told(curriculum, [result(0, True, outcome)] * 4) == [0] * 4 and curriculum.success is None


@given(RESULTS, st.integers(0, 60))
def test_a_restored_curriculum_goes_on_as_the_one_that_was_saved(results, cut):
    whole, first, rest = (Curriculum(3, promote_at=0.5, window=4) for _ in range(3))
    told(first, results[:cut])
    rest.restore(json.loads(json.dumps(first.state())))
    expected = told(whole, results)
    assert told(rest, results[cut:]) == expected[cut:]
    assert rest.state() == whole.state()


def test_a_level_that_is_gone_is_refused():
    with pytest.raises(ConfigError, match=r"level 2.*0\.\.1.*rollout\.curriculum\.levels"):
        Curriculum(2, promote_at=0.5, window=4).restore({"level": 2, "recent": []})


LAKES = FrozenLakeTask(size=2, distances=(1, 2), evaluation_maps=1, maps_per_prompt=2)


def test_what_is_evaluated_is_not_trained_on():
    plain = LAKES.training_specs(0, 40)
    evaluated = {plain[0].prompt_id, plain[8].prompt_id}
    task = TrainingTask(LAKES, evaluated=evaluated)
    for iteration in range(4):
        specs = task.training_specs(iteration, 40)
        assert len(specs) == 40 and not evaluated & {spec.prompt_id for spec in specs}
        assert task.training_specs(iteration, 60)[:40] == specs, "a further round goes on where the first ended"
        assert len({spec.trajectory_id for spec in specs}) == 40
    fresh = [spec for spec in plain if spec.prompt_id not in evaluated]
    assert task.training_specs(0, 40)[: len(fresh)] == fresh


def test_a_level_of_nothing_but_what_is_evaluated_is_refused():
    every = {spec.prompt_id for spec in LAKES.training_specs(0, 4000)}
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        TrainingTask(LAKES, evaluated=every).training_specs(0, 4)


class Groups:
    """Groups of four."""

    vocabulary, evaluation_specs = LAKES.vocabulary, LAKES.evaluation_specs

    def make_env(self, spec):
        return counting_environment(spec)

    def training_specs(self, iteration, count):
        return [
            EpisodeSpec(f"t{i}", f"p{i // 4}", f"g{i // 4}", options={"name": i // 4, "length": 9})
            for i in range(count)
        ]


def starts(task, iteration=0, count=4000):
    found = {}
    for spec in task.training_specs(iteration, count):
        start = spec.options[START_TURN], spec.options[START_SEED]
        assert found.setdefault(spec.group_id, start) == start, "a group shares its start"
    return found


def test_start_turns_are_spread_evenly_and_shared_by_a_group():
    found = starts(TrainingTask(Groups(), stagger_turns=3, seed=1))
    counts = Counter(turns for turns, _ in found.values())
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 200
    assert found == starts(TrainingTask(Groups(), stagger_turns=3, seed=1))
    assert found != starts(TrainingTask(Groups(), stagger_turns=3, seed=2))
    assert found != starts(TrainingTask(Groups(), stagger_turns=3, seed=1), iteration=1)


def test_staggered_episode_starts_where_random_play_led_and_says_so():
    """The real lake: the first observation is that of the state after the moves, equal for the whole group."""
    task = FrozenLakeTask(evaluation_maps=1, maps_per_prompt=2)
    staggered = TrainingTask(task, stagger_turns=4)
    plain, moved, stayed = {}, {}, set()
    for spec in staggered.training_specs(0, 80):
        env = staggered.make_env(spec)
        first = tuple(env.reset(spec.seed, spec.options))
        assert moved.setdefault(spec.group_id, first) == first
        plain[spec.group_id] = tuple(task.make_env(spec).reset(spec.seed, spec.options))
        assert env.step(env.valid_actions()[0]).info["start_turn"] <= spec.options[START_TURN]
        stayed |= set() if spec.options[START_TURN] else {spec.group_id}
    assert sum(moved[group] != plain[group] for group in moved) > 15
    assert stayed and all(moved[group] == plain[group] for group in stayed)
    evaluated = staggered.evaluation_specs(1)[0]
    assert type(staggered.make_env(evaluated)) is type(task.make_env(evaluated)), "evaluation starts at the beginning"


def test_record_holds_the_start_turn():
    task = TrainingTask(Groups(), stagger_turns=3)
    specs = task.training_specs(0, 24)
    limits = EpisodeLimits(max_turns=2, max_action_tokens=6, context_limit=300)
    records = play_episodes(CountingEngine(), task.make_env, specs, limits)
    assert [r.metadata["start_turn"] for r in records] == [s.options[START_TURN] for s in specs]
    assert len({r.metadata["start_turn"] for r in records}) > 1


def test_the_environment_sees_no_option_of_the_start():
    class Strict(CountingEnvironment):
        def reset(self, seed, options=None):
            assert options == {"name": 1}
            return super().reset(seed, options)

    StaggeredStart(Strict(1, length=9), turns=2, seed=0).reset(0, {"name": 1, START_TURN: 2, START_SEED: 0})


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
