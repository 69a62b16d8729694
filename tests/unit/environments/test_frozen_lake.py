"""Text environments: closed vocabulary, readable turns, actions that cannot be read, maps that can be solved."""

from __future__ import annotations

from itertools import product

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.environments.base import ACT, END, BlankedEnvironment, GymTextEnvironment
from megatron_rl.environments.frozen_lake import (
    MOVES,
    STEPS,
    FrozenLakeText,
    lake_vocabulary,
    random_lake,
    shortest_path,
)
from megatron_rl.environments.tasks import make_task
from megatron_rl.environments.vocabulary import OBSERVE, Vocabulary
from megatron_rl.errors import ConfigError, RolloutError

LAKE = ("SFF", "HFF", "FFG")


def lake(**options) -> FrozenLakeText:
    return FrozenLakeText(options.pop("desc", LAKE), lake_vocabulary(), **options)


def say(env: FrozenLakeText, text: str) -> list[int]:
    return env.vocabulary.encode(text.split())


def test_vocabulary_round_trip_and_padding():
    vocabulary = Vocabulary(["a", "b", "c"], multiple_of=8)
    assert len(vocabulary) == 8
    assert vocabulary.decode(vocabulary.encode(["c", "a"])) == ["c", "a"]


def test_vocabulary_survives_its_file(tmp_path):
    vocabulary = lake_vocabulary()
    vocabulary.save(tmp_path / "vocabulary.json")
    read = Vocabulary.load(tmp_path / "vocabulary.json")
    assert read.words == vocabulary.words
    assert read.fingerprint == vocabulary.fingerprint


def test_fingerprint_is_fixed_and_depends_on_order():
    assert Vocabulary(["a", "b"]).fingerprint == "c60f8ba575c1ad36"
    assert Vocabulary(["a", "b"]).fingerprint != Vocabulary(["b", "a"]).fingerprint


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""], ["a\n"]])
def test_vocabulary_refuses_words_that_cannot_be_told_apart(words):
    with pytest.raises(ConfigError):
        Vocabulary(words)


def test_unknown_word_and_id_are_named():
    with pytest.raises(RolloutError, match="zebra"):
        lake_vocabulary().encode(["zebra"])
    with pytest.raises(RolloutError, match="32"):
        lake_vocabulary().decode([32])
    with pytest.raises(RolloutError, match="-1"):
        lake_vocabulary().decode([-1])


def test_observation_reads_as_written():
    env = lake()
    text = " ".join(env.vocabulary.decode(env.reset(seed=0)))
    assert text == f"{OBSERVE} goal down 2 right 2 left wall down hole right ice up wall {ACT}"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("FFF FSF FFG", "down 1 right 1"),
        ("GFF FFF FFS", "up 2 left 2"),
        ("FFF SFG FFF", "down 0 right 2"),
        ("FGF FFF FSF", "up 2 right 0"),
    ],
)
def test_goal_direction_follows_the_map(start, expected):
    env = lake(desc=start.split())
    assert env.vocabulary.decode(env.reset(seed=0))[2:6] == expected.split()


def test_neighbours_agree_with_the_environment_for_every_cell():
    """Stepping the real environment in each direction must end where the words say."""
    for start in [(r, c) for r, c in product(range(3), range(3)) if LAKE[r][c] == "F"]:
        rows = [list(row.replace("S", "F")) for row in LAKE]
        rows[start[0]][start[1]] = "S"
        for word in MOVES:
            env = lake(desc=["".join(row) for row in rows])
            words = env.vocabulary.decode(env.reset(seed=0))
            cell = words[words.index(word, 6) + 1]
            result = env.step(say(env, f"{word} {END}"))
            after = divmod(env.env.unwrapped.s, 3)
            moved = tuple(np.add(start, STEPS[word]))
            assert after == (start if cell == "wall" else moved)
            assert result.terminated == (cell in ("hole", "goal"))
            assert result.info["success"] == (cell == "goal")


def test_rewards_are_the_environments_own():
    env = lake(reward_schedule=(2.0, -0.5, -0.25))
    env.reset(seed=0)
    assert env.step(say(env, f"right {END}")).reward == -0.25
    env.reset(seed=0)
    fallen = env.step(say(env, f"down {END}"))
    assert (fallen.reward, fallen.terminated, fallen.truncated, fallen.info["success"]) == (-0.5, True, False, False)


@given(st.lists(st.integers(0, 31), max_size=4))
@settings(max_examples=200, deadline=None)
def test_whatever_is_not_a_move_passes_the_turn(tokens):
    env = lake(invalid_reward=-0.125)
    first = env.reset(seed=0)
    result = env.step(tokens)
    if tokens in env.valid_actions():
        assert not result.info["invalid"]
    else:
        assert result.info["invalid"]
        assert (result.observation, result.reward, result.terminated, result.truncated) == (first, -0.125, False, False)


class CliffText(GymTextEnvironment):
    """Any environment with discrete actions fits behind the base class."""

    def describe(self, observation):
        return [str(int(observation) % 10)]

    def solved(self, observation, reward):
        return reward > 0


def test_time_limit_of_the_environment_is_a_truncation():
    vocabulary = lake_vocabulary()
    inner = gymnasium.make("CliffWalking-v1", max_episode_steps=2)
    env = CliffText(inner, vocabulary, {"up": 0})
    env.reset(seed=0)
    first, second = env.step(vocabulary.encode(["up", END])), env.step(vocabulary.encode(["up", END]))
    assert (first.truncated, first.terminated) == (False, False)
    assert (second.truncated, second.terminated) == (True, False)
    assert second.reward == -1.0


def test_blanked_environment_hides_words_and_nothing_else():
    env, plain = BlankedEnvironment(lake()), lake()
    seen = plain.vocabulary.decode(env.reset(seed=0))
    assert seen == [OBSERVE, *["<blank>"] * 13, ACT]
    plain.reset(seed=0)
    action = plain.valid_actions()[1]
    blanked, real = env.step(action), plain.step(action)
    assert (blanked.reward, blanked.terminated, blanked.info) == (real.reward, real.terminated, real.info)
    assert len(blanked.observation) == len(real.observation)


def test_random_lakes_can_be_solved_within_the_distances():
    rng = np.random.default_rng(0)
    lakes = [random_lake(rng, size=4, hole_probability=0.4, distances=(2, 4)) for _ in range(100)]
    assert {shortest_path(desc) for desc in lakes} == {2, 3, 4}
    assert len({desc[0] + desc[1] for desc in lakes}) > 90


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"distances": [5, 2]}, "distances"),
        ({"distances": [16, 20]}, "distances"),
        ({"size": 11}, "size"),
        ({"distances": [14, 15]}, "distances"),
        ({"size": 2, "evaluation_maps": 500}, "evaluation_maps"),
        ({"size": 2, "distances": [2, 2], "hole_probability": 0.0, "evaluation_maps": 4}, "evaluation_maps"),
    ],
)
def test_options_without_lakes_are_refused_instead_of_drawn_for_ever(monkeypatch, options, named):
    """Of 2 x 2 cells without holes there are four lakes with goal and start in opposite corners: none is left over."""
    monkeypatch.setattr("megatron_rl.environments.frozen_lake.LAKE_ATTEMPTS", 500)
    with pytest.raises(ConfigError, match=rf"Change: .*environment_options.*\.{named}"):
        make_task("frozen_lake", options)


def test_all_but_one_lake_can_be_set_aside():
    task = make_task("frozen_lake", {"size": 2, "distances": [2, 2], "hole_probability": 0.0, "evaluation_maps": 3})
    trained = {spec.prompt_id for spec in task.training_specs(0, 20)}
    assert len(trained) == 1 and not trained & {spec.prompt_id for spec in task.evaluation_specs(3)}


def test_random_lakes_repeat_with_their_seed():
    first, second = (random_lake(np.random.default_rng(7)) for _ in range(2))
    assert first == second


@given(st.lists(st.sampled_from("FH"), min_size=7, max_size=7), st.permutations(range(9)))
@settings(max_examples=100, deadline=None)
def test_shortest_path_agrees_with_repeated_relaxation(others, order):
    """Against the slow way: relax all neighbours until nothing changes."""
    cells = [""] * 9
    for place, letter in zip(order, ["S", "G", *others], strict=True):
        cells[place] = letter
    distance = {i: 0 if cell == "S" else np.inf for i, cell in enumerate(cells)}
    for _ in range(9):
        for i, j in product(range(9), range(9)):
            adjacent = abs(i // 3 - j // 3) + abs(i % 3 - j % 3) == 1
            if adjacent and "H" not in (cells[i], cells[j]):
                distance[j] = min(distance[j], distance[i] + 1)
    expected = distance[cells.index("G")]
    assert shortest_path(["".join(cells[r : r + 3]) for r in (0, 3, 6)]) == (None if np.isinf(expected) else expected)


@pytest.mark.parametrize("desc", [("SFF", "FFF", "FFF"), ("SGF", "FFF", "FFG"), ("S" + "F" * 10 + "G",)])
def test_impossible_lakes_are_refused(desc):
    with pytest.raises(ConfigError):
        lake(desc=desc)
