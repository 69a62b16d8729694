"""A task of two phases: walk around a box, then push it onto a goal. Pushes cannot be undone.

Rooms are written in the usual letters: `#` wall, `-` floor, `.` goal, `$` box, `@` agent, `+` agent on the goal; what
lies outside is wall. One box, one goal. What a turn looks like, in words::

    <observation> box down 1 right 0 goal down 3 right 1 open left down <act>   (observed)
    down <end>                                                                  (sampled)

Invariants:

* Both distances are counted from the agent; an `open` move changes something and leaves the room solvable.
* A room drawn by `random_room` can be solved, in a number of moves (steps and pushes) that search has found least.
* A push after which no moves can solve the room ends the episode, with the reward `stuck_reward`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np

from megatron_rl.environments.base import GymTextEnvironment
from megatron_rl.environments.frozen_lake import MOVES, STEPS
from megatron_rl.environments.map_task import Map, MapTask
from megatron_rl.environments.vocabulary import END, STRUCTURE_WORDS, Vocabulary
from megatron_rl.errors import ConfigError

MAX_ROOM_SIZE = 10
ROOM_ATTEMPTS = 100
"""Draws after which there is taken to be no such room."""
Cell = tuple[int, int]
State = tuple[Cell, Cell]
"""Where the agent and the box are, each (row, column)."""
_DIRECTIONS = {MOVES[name]: step for name, step in STEPS.items()}


def sokoban_vocabulary() -> Vocabulary:
    """The words of `SokobanText` for rooms of up to 10 x 10 cells, 21 of 32 ids; the rest is reserved."""
    distances = [str(i) for i in range(MAX_ROOM_SIZE)]
    return Vocabulary([*STRUCTURE_WORDS, *MOVES, "box", "goal", "open", *distances], multiple_of=32)


def moved(floor: frozenset[Cell], state: State, action: int) -> State:
    """The state after a move: the agent steps, pushes the box, or stays where a wall or a blocked box is in the way.

    Args:
        floor: every cell that is not wall.
        state: agent and box.
        action: a value of `MOVES`.
    """
    (row, column), box = state
    down, right = _DIRECTIONS[action]
    target = (row + down, column + right)
    if target not in floor:
        return state
    if target != box:
        return target, box
    pushed = (box[0] + down, box[1] + right)
    return (target, pushed) if pushed in floor else state


@lru_cache(maxsize=1024)
def solution_lengths(floor: frozenset[Cell], goal: Cell) -> Mapping[State, int]:
    """Least moves that put the box on the goal, from every state that has such moves.

    A search breadth first from the solved states along reversed moves: O(cells²).
    """
    before: dict[State, list[State]] = {}
    for agent in floor:
        for box in floor - {agent}:
            for action in _DIRECTIONS:
                before.setdefault(moved(floor, (agent, box), action), []).append((agent, box))
    lengths = {(agent, goal): 0 for agent in floor - {goal}}
    queue = deque(lengths)
    while queue:
        state = queue.popleft()
        for earlier in before.get(state, ()):
            if earlier not in lengths:
                lengths[earlier] = lengths[state] + 1
                queue.append(earlier)
    return MappingProxyType(lengths)


def read_room(desc: Sequence[str]) -> tuple[frozenset[Cell], Cell, State]:
    """Floor cells, goal, and the first state of a room.

    Raises:
        ConfigError: an unknown letter, too large, or not exactly one agent, box and goal.
    """
    letters = {(r, c): letter for r, row in enumerate(desc) for c, letter in enumerate(row)}
    if max(len(desc), *map(len, desc)) > MAX_ROOM_SIZE or set(letters.values()) - set("#-.$@+"):
        raise ConfigError(
            "room cannot be read", field="desc", found="/".join(desc), expected="at most 10 x 10 of #-.$@+"
        )
    agent, box, goal = (_only(letters, marks) for marks in ("@+", "$", ".+"))
    return frozenset(cell for cell, letter in letters.items() if letter != "#"), goal, (agent, box)


def _only(letters: Mapping[Cell, str], marks: str) -> Cell:
    found = [cell for cell, letter in letters.items() if letter in marks]
    if len(found) != 1:
        raise ConfigError(f"a room needs exactly one of {marks}", field="desc", found=len(found), expected=1)
    return found[0]


class SokobanEnv(gymnasium.Env):
    """One room with one box. Observations are `(agent row, agent column, box row, box column)`.

    Args:
        desc: the room, see the module.
        reward_schedule: rewards of solving, of getting stuck, and of any other move.
    """

    def __init__(self, desc: Sequence[str], reward_schedule: tuple[float, float, float] = (1.0, 0.0, 0.0)) -> None:
        self.floor, self.goal, self._start = read_room(desc)
        self.lengths = solution_lengths(self.floor, self.goal)
        self.state, self._rewards = self._start, reward_schedule
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.observation_space = gymnasium.spaces.MultiDiscrete([MAX_ROOM_SIZE] * 4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Put agent and box where the room says; nothing is drawn."""
        super().reset(seed=seed)
        self.state = self._start
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """See `gymnasium.Env.step`; terminates when solved and when stuck."""
        self.state = moved(self.floor, self.state, action)
        solved, stuck = self.state[1] == self.goal, self.state not in self.lengths
        reward = self._rewards[0] if solved else self._rewards[1] if stuck else self._rewards[2]
        return self._observation(), reward, solved or stuck, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([*self.state[0], *self.state[1]])


class SokobanText(GymTextEnvironment):
    """The agent reads where box and goal lie from where it stands, and which moves are open; never the whole room.

    Args:
        desc: the room, see the module.
        vocabulary: `sokoban_vocabulary()` or one that holds its words.
        reward_schedule: see `SokobanEnv`.
        invalid_reward: see `GymTextEnvironment`.
    """

    def __init__(
        self,
        desc: Sequence[str],
        vocabulary: Vocabulary,
        *,
        reward_schedule: tuple[float, float, float] = (1.0, 0.0, 0.0),
        invalid_reward: float = 0.0,
    ) -> None:
        self.room = SokobanEnv(desc, reward_schedule)
        super().__init__(self.room, vocabulary, MOVES, invalid_reward=invalid_reward)

    def describe(self, observation: np.ndarray) -> list[str]:
        """`box <down|up> d <right|left> d goal <down|up> d <right|left> d open <moves>`."""
        agent, box = (int(observation[0]), int(observation[1])), (int(observation[2]), int(observation[3]))
        places = ["box", *_offset(agent, box), "goal", *_offset(agent, self.room.goal)]
        return [*places, "open", *self._open_moves((agent, box))]

    def solved(self, observation: np.ndarray, reward: float) -> bool:
        """Whether the box stands on the goal."""
        return (int(observation[2]), int(observation[3])) == self.room.goal

    def valid_actions(self) -> list[list[int]]:
        """The open moves; all, where there is none."""
        moves = self._open_moves(self.room.state)
        return [self.vocabulary.encode([move, END]) for move in moves] or super().valid_actions()

    def _open_moves(self, state: State) -> list[str]:
        after = {name: moved(self.room.floor, state, action) for name, action in MOVES.items()}
        return [name for name, other in after.items() if other != state and other in self.room.lengths]


def _offset(origin: Cell, target: Cell) -> list[str]:
    down, right = target[0] - origin[0], target[1] - origin[1]
    return ["down" if down >= 0 else "up", str(abs(down)), "right" if right >= 0 else "left", str(abs(right))]


def random_room(
    rng: np.random.Generator, *, size: int = 5, wall_probability: float = 0.1, distances: tuple[int, int] = (1, 6)
) -> tuple[str, ...]:
    """A random square room whose shortest solution has a length in `distances`; every length is equally likely.

    Args:
        rng: the only source of randomness.
        size: cells of a side.
        wall_probability: chance of each other cell to be wall.
        distances: least and greatest number of moves of the shortest solution, both inclusive.

    Returns:
        `size` rows of `size` letters.

    Raises:
        ConfigError: no such room turned up in `ROOM_ATTEMPTS` draws.
    """
    for _ in range(ROOM_ATTEMPTS):
        cells = np.where(rng.random((size, size)) < wall_probability, "#", "-")
        goal = divmod(int(rng.integers(size * size)), size)
        cells[goal] = "."
        lengths = solution_lengths(frozenset(zip(*map(np.ndarray.tolist, np.nonzero(cells != "#")), strict=True)), goal)
        wanted = int(rng.integers(distances[0], distances[1] + 1))
        starts = sorted(state for state, moves in lengths.items() if moves == wanted)
        if starts:
            agent, box = starts[int(rng.integers(len(starts)))]
            cells[agent], cells[box] = "+" if agent == goal else "@", "$"
            return tuple("".join(row) for row in cells)
    raise _none_found(f"size {size}, wall_probability {wall_probability}, distances {tuple(distances)}")


def _none_found(found: str) -> ConfigError:
    return ConfigError(
        "no such room turned up",
        found=found,
        expected="rooms enough to draw from",
        setting="rollout.environment_options",
    )


class SokobanTask(MapTask):
    """Random rooms, drawn afresh for each iteration; evaluation rooms are never trained on.

    Args:
        size, wall_probability, distances: see `random_room`.
        step_reward: reward of a move that ends nothing.
        stuck_reward: reward of a push that makes the room unsolvable.
        invalid_reward: reward of a turn whose action could not be read.
        evaluation_maps: how many rooms are set aside.
        maps_per_prompt: episodes that share one room in an iteration.
        blank: hide every observation (a control).
        seed: seed of all rooms.

    Raises:
        ConfigError: the options describe no room, or fewer than are to be set aside.
    """

    def __init__(
        self,
        *,
        size: int = 5,
        wall_probability: float = 0.1,
        distances: tuple[int, int] = (1, 6),
        step_reward: float = 0.0,
        stuck_reward: float = 0.0,
        invalid_reward: float = 0.0,
        evaluation_maps: int = 256,
        maps_per_prompt: int = 1,
        blank: bool = False,
        seed: int = 0,
    ) -> None:
        if not 3 <= size <= MAX_ROOM_SIZE or not 1 <= distances[0] <= distances[1]:
            raise ConfigError(
                "no such room", found=f"size {size}, distances {tuple(distances)}",
                expected=f"size 3..{MAX_ROOM_SIZE}, 1 <= least <= greatest", setting="rollout.environment_options",
            )  # fmt: skip
        self._draw: dict[str, Any] = {
            "size": size, "wall_probability": wall_probability, "distances": tuple(distances),
        }  # fmt: skip
        self._rewards, self._invalid = (1.0, stuck_reward, step_reward), invalid_reward
        if evaluation_maps < 1:
            raise self.too_few(0, evaluation_maps)
        super().__init__(
            sokoban_vocabulary(), evaluation_maps=evaluation_maps, maps_per_prompt=maps_per_prompt, blank=blank,
            seed=seed,
        )  # fmt: skip

    def draw_map(self, rng: np.random.Generator) -> Map:
        """See `random_room`."""
        return random_room(rng, **self._draw)

    def make_world(self, desc: Map) -> SokobanText:
        """The room of this map."""
        return SokobanText(desc, self.vocabulary, reward_schedule=self._rewards, invalid_reward=self._invalid)

    def too_few(self, found: int, wanted: int) -> ConfigError:
        """Names what was drawn."""
        return _none_found(f"{wanted} of {self._draw}")
