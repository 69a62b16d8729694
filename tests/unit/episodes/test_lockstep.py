"""The lock-step runner with scripted engines and environments: every field of every record is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.engines import Generation
from megatron_rl.environments.base import EpisodeSpec, StepResult
from megatron_rl.episodes.episode import EpisodeLimits
from megatron_rl.episodes.lockstep import play_episodes, random_play
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import OUTCOMES
from tests.unit.episodes.counting import STOP as COUNTING_STOP
from tests.unit.episodes.counting import CountingEngine, CountingEnvironment, counting_environment, specs_of

STOP = 99
LAYERS, TOPK = 2, 2
SHORT = EpisodeLimits(max_turns=9, max_action_tokens=4, context_limit=60)


class ScriptedEngine:
    """Samples `action` whatever the prompt, cut at `max_new_tokens`; routes are a function of the prompt's tokens."""

    def __init__(self, action: Sequence[int] = (50, STOP), routes: bool = True) -> None:
        self.action, self.routes = list(action), routes
        self.calls: list[tuple[int, int]] = []
        self.prompts: list[list[int]] = []
        self.version = 0

    def generate(self, prompts, max_new_tokens, stop_tokens, greedy=False, streams=None):
        self.calls.append((len(prompts), max_new_tokens))
        self.prompts += [list(prompt) for prompt in prompts]
        self.version += 1
        return [self._continue(list(prompt), max_new_tokens, list(stop_tokens)) for prompt in prompts]

    def _continue(self, prompt, limit, stops):
        tokens = self.action[:limit]
        for i, token in enumerate(tokens):
            if token in stops:
                tokens = tokens[: i + 1]
                break
        logprobs = np.asarray([-(len(prompt) + i) for i in range(len(tokens))], np.float32)
        return Generation(np.asarray(tokens, np.int32), logprobs, self._routes(prompt + tokens), self.version)

    def _routes(self, tokens):
        if not self.routes:
            return None
        rows = [[[token % 7, 7 + layer] for token in tokens[:-1]] for layer in range(LAYERS)]
        return np.asarray(rows, np.uint8).reshape(LAYERS, len(tokens) - 1, TOPK)


class ScriptedEnvironment:
    """Shows [10, 11] first and [20 + turn, 30] after each turn; ends after `length` turns."""

    def __init__(self, length=3, ending="terminated", raise_at=None, stops=(STOP,), first=(10, 11)):
        self.length, self.ending, self.raise_at = length, ending, raise_at
        self.stop_tokens, self.first = list(stops), list(first)
        self.turn = 0
        self.actions: list[list[int]] = []

    def reset(self, seed, options=None):
        if self.raise_at == 0:
            raise OSError("no lake today")
        self.seed, self.turn = seed, 0
        return self.first

    def step(self, action_tokens):
        self.turn += 1
        self.actions.append(list(action_tokens))
        if self.turn == self.raise_at:
            raise RuntimeError("the ice broke")
        over = self.turn == self.length
        info = {"invalid": self.turn == 1, "success": over and self.ending == "terminated"}
        ends = {"terminated": over and self.ending == "terminated", "truncated": over and self.ending == "truncated"}
        return StepResult([20 + self.turn, 30], self.turn / 4, **ends, info=info)

    def valid_actions(self):
        return [[50, STOP], [51, 52, STOP]]


def play(environments, engine=None, concurrency=128, **limits):
    specs = [EpisodeSpec(f"t{i}", f"p{i // 2}", f"g{i // 2}", seed=i) for i in range(len(environments))]
    by_id = {spec.trajectory_id: env for spec, env in zip(specs, environments, strict=True)}
    limits = EpisodeLimits(**({"max_turns": 5, "max_action_tokens": 3, "context_limit": 100} | limits))
    made = play_episodes(
        engine or ScriptedEngine(), lambda spec: by_id[spec.trajectory_id], specs, limits, concurrency=concurrency
    )
    for record in made:
        check_invariants(record)
    return made


def check_invariants(record):
    n = len(record.tokens)
    assert record.outcome in OUTCOMES
    assert not (record.terminated and record.truncated)
    assert {len(record.action_mask), len(record.turn_id), len(record.logprobs), len(record.version)} == {n}
    dtypes = [getattr(record, name).dtype for name in ("tokens", "action_mask", "turn_id", "logprobs", "version")]
    assert dtypes == [np.int32, np.bool_, np.int16, np.float32, np.int32]
    np.testing.assert_array_equal(record.action_mask, record.turn_id >= 0)
    assert sorted(set(record.turn_id[record.action_mask])) == list(range(len(record.turn_rewards)))
    assert not record.logprobs[~record.action_mask].any()
    if n:
        assert not record.action_mask[0]
        assert record.action_mask[-1]
    if record.routes is not None:
        expected = [[[token % 7, 7 + layer] for token in record.tokens[:-1]] for layer in range(LAYERS)]
        np.testing.assert_array_equal(record.routes, expected)


def test_terminated_episode_is_recorded_token_by_token():
    env = ScriptedEnvironment(length=3)
    (record,) = play([env])
    assert record.tokens.tolist() == [10, 11, 50, STOP, 21, 30, 50, STOP, 22, 30, 50, STOP]
    assert record.turn_id.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, -1, -1, 2, 2]
    assert record.logprobs.tolist() == [0, 0, -2, -3, 0, 0, -6, -7, 0, 0, -10, -11]
    assert record.version[record.action_mask].tolist() == [1, 1, 2, 2, 3, 3]
    assert record.turn_rewards.tolist() == [0.25, 0.5, 0.75]
    assert (record.reward, record.outcome, record.terminated, record.truncated) == (0.0, "completed", True, False)
    assert record.boundary_tokens is None
    assert env.actions == [[50, STOP]] * 3
    assert env.seed == 0
    assert record.metadata["success"]
    assert (record.metadata["invalid_actions"], record.metadata["repeated_actions"]) == (1, 2)
    assert record.routes.shape == (LAYERS, 11, TOPK)


@pytest.mark.parametrize(("env", "limits"), [(ScriptedEnvironment(9), {"max_turns": 2}),
                                             (ScriptedEnvironment(2, "truncated"), {})])  # fmt: skip
def test_turn_limits_keep_the_last_observation_at_the_boundary(env, limits):
    (record,) = play([env], **limits)
    assert record.tokens.tolist() == [10, 11, 50, STOP, 21, 30, 50, STOP]
    assert record.boundary_tokens.tolist() == [22, 30]
    assert (record.outcome, record.terminated, record.truncated) == ("truncated_turns", False, True)
    assert record.turn_rewards.tolist() == [0.25, 0.5]


def test_termination_on_the_last_turn_is_a_termination():
    (record,) = play([ScriptedEnvironment(2)], max_turns=2)
    assert (record.outcome, record.terminated, record.truncated) == ("completed", True, False)


def test_observation_that_leaves_no_room_goes_to_the_boundary():
    (record,) = play([ScriptedEnvironment(9)], context_limit=6)
    assert record.tokens.tolist() == [10, 11, 50, STOP]
    assert record.boundary_tokens.tolist() == [21, 30]
    assert (record.outcome, record.truncated) == ("truncated_length", True)


def test_action_cut_by_the_context_never_reaches_the_environment():
    env = ScriptedEnvironment(9)
    (record,) = play([env], context_limit=7)
    assert record.tokens.tolist() == [10, 11, 50, STOP, 21, 30, 50]
    assert record.boundary_tokens.tolist() == []
    assert (record.outcome, record.truncated) == ("truncated_length", True)
    assert record.turn_rewards.tolist() == [0.25, 0.0]
    assert len(env.actions) == 1


def test_action_that_just_fits_is_played():
    env = ScriptedEnvironment(2)
    (record,) = play([env], context_limit=8)
    assert (record.outcome, len(record.tokens)) == ("completed", 8)


def test_action_without_stop_is_handed_over_at_its_own_limit():
    env = ScriptedEnvironment(1)
    (record,) = play([env], ScriptedEngine((1, 2, 3, 4, 5)), max_action_tokens=3)
    assert env.actions == [[1, 2, 3]]
    assert record.outcome == "completed"


def test_environment_errors_keep_what_was_recorded_and_spare_the_others():
    broken, whole, stillborn = (
        ScriptedEnvironment(9, raise_at=2),
        ScriptedEnvironment(3),
        ScriptedEnvironment(raise_at=0),
    )
    records = play([broken, whole, stillborn])
    assert [record.outcome for record in records] == ["environment_error", "completed", "environment_error"]
    assert records[0].tokens.tolist() == [10, 11, 50, STOP, 21, 30, 50, STOP]
    assert records[0].turn_rewards.tolist() == [0.25, 0.0]
    assert (records[0].terminated, records[0].truncated, records[0].boundary_tokens) == (False, False, None)
    assert records[0].metadata["error"] == "RuntimeError: the ice broke"
    assert len(records[2].tokens) == 0
    assert records[2].metadata["error"] == "OSError: no lake today"


def test_engine_errors_are_not_swallowed():
    engine = ScriptedEngine()
    engine.generate = lambda *_: (_ for _ in ()).throw(RuntimeError("engine"))
    with pytest.raises(RuntimeError, match="engine"):
        play([ScriptedEnvironment()], engine)


def test_slow_episodes_do_not_hold_the_others_back():
    """Ten slots of work in pairs: one episode of 5 turns and five of 1 turn take 5 calls, always two at a time."""
    engine = ScriptedEngine()
    lengths = [5, 1, 1, 1, 1, 1]
    records = play([ScriptedEnvironment(n) for n in lengths], engine, concurrency=2)
    assert engine.calls == [(2, 3)] * 5
    assert [len(record.turn_rewards) for record in records] == lengths
    assert [record.trajectory_id for record in records] == [f"t{i}" for i in range(6)]
    assert [record.group_id for record in records] == ["g0", "g0", "g1", "g1", "g2", "g2"]


def test_episodes_share_a_call_only_if_budget_and_stops_agree():
    engine = ScriptedEngine()
    play([ScriptedEnvironment(1), ScriptedEnvironment(1, stops=(50,)), ScriptedEnvironment(1, first=[1] * 8)], engine,
         context_limit=10)  # fmt: skip
    assert sorted(engine.calls) == [(1, 2), (1, 3), (1, 3)]


def test_every_prompt_is_the_exact_prefix_of_the_record():
    engine = ScriptedEngine()
    (record,) = play([ScriptedEnvironment(4)], engine)
    for prompt in engine.prompts:
        assert record.tokens[: len(prompt)].tolist() == prompt


def test_first_routes_are_kept_and_differing_rows_counted():
    """The second call reports other experts for two rows and the same experts in another order for a third."""
    engine = ScriptedEngine()
    routes = engine._routes

    def changed(tokens):
        rows = routes(tokens)
        if len(tokens) > 4:
            rows[0, 0], rows[1, 2], rows[1, 1] = [5, 6], [5, 6], rows[1, 1, ::-1].copy()
        return rows

    engine._routes = changed
    (record,) = play([ScriptedEnvironment(2)], engine)
    assert record.metadata["route_conflicts"] == 2


def test_engine_without_routes():
    (record,) = play([ScriptedEnvironment(2)], ScriptedEngine(routes=False))
    assert record.routes is None


@pytest.mark.parametrize("name", ["max_turns", "max_action_tokens", "context_limit", "concurrency"])
def test_limits_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        play([ScriptedEnvironment()], **{name: 0})


def test_first_observation_without_room_is_a_configuration_error():
    with pytest.raises(ConfigError, match="leaves no room.*found 10, expected < 10.*batching.token_budget"):
        play([ScriptedEnvironment(first=[1] * 10)], context_limit=10)


def test_no_episodes():
    assert play([]) == []


def test_interrupted_calls_go_on_in_the_same_turn():
    """Each call yields one token and new weights: the same record but for versions."""

    class Interrupting(CountingEngine):
        def generate(self, prompts, max_new_tokens, stop_tokens, greedy=False, streams=None):
            made = super().generate(prompts, 1, stop_tokens, greedy)
            self.version += 1
            return [replace(one, interrupted=max_new_tokens > 1 and one.tokens[-1] != COUNTING_STOP) for one in made]

    records = play_episodes(Interrupting(), counting_environment, specs_of([5, 3]), SHORT)
    expected = play_episodes(CountingEngine(), counting_environment, specs_of([5, 3]), SHORT)
    for record, whole in zip(records, expected, strict=True):
        for name in ("tokens", "turn_id", "logprobs", "routes", "turn_rewards"):
            np.testing.assert_array_equal(getattr(record, name), getattr(whole, name))
        assert (np.diff(record.version[record.action_mask]) > 0).all()
        assert record.metadata["interruptions"] == record.action_mask.sum() - len(record.turn_rewards)


def test_environments_are_closed_even_if_they_complain():
    class Complaining(CountingEnvironment):
        def close(self):
            super().close()
            raise OSError("busy")

    made = []

    def make(spec):
        made.append(Complaining(spec.options["name"], spec.options["length"]))
        return made[-1]

    play_episodes(CountingEngine(), make, specs_of([1, 4]), SHORT)
    assert [env.closed for env in made] == [1, 1]


def test_random_play_plays_valid_actions_only_and_marks_them():
    specs = [EpisodeSpec(f"t{i}", "p", "g") for i in range(40)]
    demos = random_play(lambda _spec: ScriptedEnvironment(3), specs, max_turns=9, context_limit=100, seed=1)
    seen = set()
    for demo in demos:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], demo.action_mask.astype(int), [0]])))
        actions = [tuple(demo.tokens[a:b]) for a, b in edges.reshape(-1, 2)]
        assert len(actions) == 3
        assert demo.success
        seen |= set(actions)
        assert demo.tokens[~demo.action_mask].tolist() == [10, 11, 21, 30, 22, 30]
    assert seen == {(50, STOP), (51, 52, STOP)}


@pytest.mark.parametrize("limits", [{"max_turns": 2, "context_limit": 100}, {"max_turns": 9, "context_limit": 11}])
def test_random_play_stays_within_its_limits(limits):
    specs = [EpisodeSpec(f"t{i}", "p", "g") for i in range(20)]
    for demo in random_play(lambda _spec: ScriptedEnvironment(9), specs, **limits):
        assert len(demo.tokens) <= limits["context_limit"]
        assert demo.action_mask[-1]
        assert not demo.success
