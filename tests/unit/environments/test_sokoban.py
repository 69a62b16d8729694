"""Sokoban: what a move does, least solutions, readable turns, rooms that can be solved."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.environments.base import END
from megatron_rl.environments.frozen_lake import MOVES
from megatron_rl.environments.sokoban import (
    SokobanEnv,
    SokobanTask,
    SokobanText,
    moved,
    random_room,
    read_room,
    sokoban_vocabulary,
    solution_lengths,
)
from megatron_rl.environments.tasks import make_task
from megatron_rl.environments.vocabulary import OBSERVE
from megatron_rl.errors import ConfigError

ROOM = ("-----", "-@$-.", "-----")


def text(desc=ROOM, **options) -> SokobanText:
    env = SokobanText(desc, sokoban_vocabulary(), **options)
    env.reset(0)
    return env


def play(env: SokobanText, *words: str):
    return [env.step(env.vocabulary.encode([word, END])) for word in words][-1]


def forward_search(floor, goal, start) -> int | None:
    """Breadth first from the start, by rules written out again: the other direction of `solution_lengths`."""
    steps = [(0, -1), (1, 0), (0, 1), (-1, 0)]
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        (agent, box), moves = queue.popleft()
        if box == goal:
            return moves
        for down, right in steps:
            target = (agent[0] + down, agent[1] + right)
            beyond = (target[0] + down, target[1] + right)
            if target not in floor or (target == box and beyond not in floor):
                continue
            state = (target, beyond if target == box else box)
            if state not in seen:
                seen.add(state)
                queue.append((state, moves + 1))
    return None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_solution_lengths_equal_a_search_from_the_start(seed):
    rng = np.random.default_rng(seed)
    cells = [(r, c) for r in range(4) for c in range(4) if rng.random() > 0.25]
    if len(cells) < 3:
        return
    floor = frozenset(cells)
    agent, box, goal = (cells[i] for i in rng.choice(len(cells), 3, replace=False))
    assert solution_lengths(floor, goal).get((agent, box)) == forward_search(floor, goal, (agent, box))


def test_a_move_steps_pushes_or_stays():
    floor, _, start = read_room(ROOM)
    assert start == ((1, 1), (1, 2))
    assert moved(floor, start, MOVES["right"]) == ((1, 2), (1, 3))
    assert moved(floor, start, MOVES["left"]) == ((1, 0), (1, 2))
    assert moved(floor, ((1, 0), (1, 2)), MOVES["left"]) == ((1, 0), (1, 2))
    assert moved(floor, ((1, 3), (1, 4)), MOVES["right"]) == ((1, 3), (1, 4))


def test_observation_reads_as_written():
    env = text()
    words = env.vocabulary.decode(env.reset(0))
    assert " ".join(words) == f"{OBSERVE} box down 0 right 1 goal down 0 right 3 open left down right up <act>"


def test_open_moves_keep_the_room_solvable():
    """A box in a corner that is not the goal is lost: the push that would do it is not among the open moves."""
    env = text(("--.", "$--", "@--"))
    assert "up" not in env.vocabulary.decode(env.reset(0))[11:]
    result = play(env, "up")
    assert (result.terminated, result.info["success"]) == (True, False)


def test_rewards_of_solving_getting_stuck_and_walking():
    rewards = (1.0, -0.5, -0.05)
    assert play(text(reward_schedule=rewards), "left").reward == -0.05
    env = text(reward_schedule=rewards)
    solved = play(env, "right", "right")
    assert (solved.reward, solved.terminated, solved.info["success"]) == (1.0, True, True)
    stuck = play(text(("---", "$-.", "@--"), reward_schedule=rewards), "up")
    assert (stuck.reward, stuck.terminated, stuck.info["success"]) == (-0.5, True, False)


def test_an_unreadable_action_passes_the_turn():
    env = text(invalid_reward=-0.1)
    before = env.room.state
    result = env.step(env.vocabulary.encode(["box", END]))
    assert (result.reward, result.info["invalid"], env.room.state) == (-0.1, True, before)


def test_gymnasium_accepts_the_environment():
    check_env(SokobanEnv(ROOM), skip_render_check=True)
    assert isinstance(SokobanEnv(ROOM), gymnasium.Env)


@pytest.mark.parametrize("desc", [("@$-",), ("@$..",), ("@$.x",), ("@$." + "-" * 8,), ("@@$.",)])
def test_bad_rooms_are_refused(desc):
    with pytest.raises(ConfigError):
        read_room(desc)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([(1, 3), (4, 6), (7, 9)]))
def test_random_rooms_are_solved_within_the_distances(seed, distances):
    desc = random_room(np.random.default_rng(seed), distances=distances)
    floor, goal, start = read_room(desc)
    assert distances[0] <= forward_search(floor, goal, start) <= distances[1]
    assert len(desc) == 5


def test_following_least_solutions_solves_every_evaluation_room():
    task = make_task("sokoban", {"evaluation_maps": 8, "distances": [2, 6]})
    for spec in task.evaluation_specs(8):
        env = task.make_env(spec)
        env.reset(0)
        for _ in range(6):
            after = {a: moved(env.room.floor, env.room.state, a) for a in MOVES.values()}
            best = min(after, key=lambda a: env.room.lengths.get(after[a], 99))
            word = next(name for name, action in MOVES.items() if action == best)
            result = play(env, word)
            if result.terminated:
                break
        assert result.info["success"]


def test_specs_are_pure_grouped_and_never_held_out():
    tasks = [SokobanTask(evaluation_maps=16, maps_per_prompt=4) for _ in range(2)]
    first, second = (task.training_specs(3, 10) for task in tasks)
    assert first == second
    assert first != tasks[0].training_specs(4, 10)
    assert [spec.group_id == first[0].group_id for spec in first] == [True] * 4 + [False] * 6
    assert len({spec.trajectory_id for spec in first}) == 10


def test_held_out_rooms_are_never_trained_on():
    """Of twelve rooms with one push to go, six are set aside and the six others are all trained on."""
    task = SokobanTask(size=3, wall_probability=0.0, distances=(1, 1), evaluation_maps=6)
    held_out = {spec.options["map"] for spec in task.evaluation_specs(12)}
    trained = {spec.options["map"] for i in range(5) for spec in task.training_specs(i, 40)}
    assert (len(held_out), len(trained), len(trained & held_out)) == (6, 6, 0)


@pytest.mark.parametrize("options", [{"evaluation_maps": 13}, {"distances": (30, 40)}])
def test_options_without_rooms_are_refused_instead_of_searched_for_ever(options):
    with pytest.raises(ConfigError, match="turned up"):
        SokobanTask(**{"size": 3, "wall_probability": 0.0, "distances": (1, 1)} | options)


def test_a_task_whose_every_room_is_held_out_cannot_be_trained_on():
    task = SokobanTask(size=3, wall_probability=0.0, distances=(1, 1), evaluation_maps=12)
    with pytest.raises(ConfigError, match="turned up"):
        task.training_specs(0, 1)


def test_the_blank_control_hides_box_and_goal():
    task = SokobanTask(evaluation_maps=1, blank=True)
    words = task.vocabulary.decode(task.make_env(task.evaluation_specs(1)[0]).reset(0, {}))
    assert set(words[1:-1]) == {"<blank>"}


@pytest.mark.parametrize("options", [{"size": 2}, {"size": 11}, {"distances": [5, 3]}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match="environment_options"):
        make_task("sokoban", options)
