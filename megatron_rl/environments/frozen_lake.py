"""FrozenLake as text: random lakes, of which the agent reads what is around it, never the whole map.

What a turn looks like, in words::

    <observation> goal down 2 right 1 left ice down hole right ice up wall <act>   (observed)
    right <end>                                                                    (sampled)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from megatron_rl.environments.base import GymTextEnvironment
from megatron_rl.environments.map_task import DRAWS_PER_MAP, Map, MapTask
from megatron_rl.environments.vocabulary import END, STRUCTURE_WORDS, Vocabulary
from megatron_rl.errors import ConfigError

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
"""Action word to FrozenLake action."""


STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Action word to (row, column) step."""


CELL_WORDS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


MAX_LAKE_SIZE = 10


LAKE_ATTEMPTS = 100_000
"""Draws after which there is taken to be no such lake: 40 times what opposite corners of the largest take without holes
(10 x 10 cells: 4 of 9900 places of start and goal)."""


def lake_vocabulary() -> Vocabulary:
    """The words of `FrozenLakeText` for lakes of up to 10 x 10 cells, 22 of 32 ids; the rest is reserved."""
    distances = [str(i) for i in range(MAX_LAKE_SIZE)]
    return Vocabulary([*STRUCTURE_WORDS, *MOVES, "ice", "hole", "goal", "wall", *distances], multiple_of=32)


class FrozenLakeText(GymTextEnvironment):
    """FrozenLake: the agent reads where the goal lies and what is around it, never the whole map.

    Args:
        desc: rows of S (start; one is drawn if there are several), F, H and one G (goal), at most 10 x 10.
        vocabulary: `lake_vocabulary()` or one that holds its words.
        slippery: whether the ice deflects moves.
        view: what is around: `cells` names the four neighbour cells, `moves` lists the moves that end neither in a
            hole nor at a wall (and random valid play chooses among those).
        reward_schedule: rewards of reaching the goal, a hole, and any other cell.
        invalid_reward: see `GymTextEnvironment`.
    """

    def __init__(
        self,
        desc: Sequence[str],
        vocabulary: Vocabulary,
        *,
        slippery: bool = False,
        view: Literal["cells", "moves"] = "cells",
        reward_schedule: tuple[float, float, float] = (1.0, 0.0, 0.0),
        invalid_reward: float = 0.0,
    ) -> None:
        if max(len(desc), len(desc[0])) > MAX_LAKE_SIZE:
            raise ConfigError(
                "lake too large", field="desc", found=f"{len(desc)} x {len(desc[0])}", expected="<= 10 x 10"
            )
        rewards: Any = reward_schedule  # annotated as integers there, but only handed through
        env = FrozenLakeEnv(desc=list(desc), is_slippery=slippery, reward_schedule=rewards)
        super().__init__(env, vocabulary, MOVES, invalid_reward=invalid_reward)
        self.desc = tuple(desc)
        self._goal, self._view = _find(self.desc, "G"), view

    def describe(self, observation: int) -> list[str]:
        """`goal <down|up> d <right|left> d`, then each direction with its cell, or the open moves."""
        row, column = divmod(int(observation), len(self.desc[0]))
        down, right = self._goal[0] - row, self._goal[1] - column
        words = [
            "goal",
            "down" if down >= 0 else "up",
            str(abs(down)),
            "right" if right >= 0 else "left",
            str(abs(right)),
        ]
        if self._view == "moves":
            return words + self._open_moves(row, column)
        for name, (step_row, step_column) in STEPS.items():
            words += [name, self._cell(row + step_row, column + step_column)]
        return words

    def valid_actions(self) -> list[list[int]]:
        """Every action, or the open moves where only they are shown (all, where there is none)."""
        if self._view == "cells":
            return super().valid_actions()
        moves = self._open_moves(*divmod(int(self._observation), len(self.desc[0])))
        return [self.vocabulary.encode([move, END]) for move in moves] or super().valid_actions()

    def _open_moves(self, row: int, column: int) -> list[str]:
        return [name for name, (r, c) in STEPS.items() if self._cell(row + r, column + c) in ("ice", "goal")]

    def solved(self, observation: int, reward: float) -> bool:
        """Whether the agent stands on the goal."""
        return divmod(int(observation), len(self.desc[0])) == self._goal

    def _cell(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self.desc) and 0 <= column < len(self.desc[0])
        return CELL_WORDS[self.desc[row][column]] if inside else "wall"


def random_lake(
    rng: np.random.Generator,
    *,
    size: int = 4,
    hole_probability: float = 0.2,
    distances: tuple[int, int] = (1, 6),
) -> tuple[str, ...]:
    """A random square map with a random start and goal whose shortest safe path has a length in `distances`.

    Args:
        rng: the only source of randomness.
        size: cells of a side.
        hole_probability: chance of each other cell to be a hole.
        distances: least and greatest number of moves from start to goal, both inclusive.

    Returns:
        `size` rows of `size` letters, to be given to `FrozenLakeText` or to gymnasium's `desc=`.

    Raises:
        ConfigError: no such lake turned up in `LAKE_ATTEMPTS` draws.
    """
    for _ in range(LAKE_ATTEMPTS):
        cells = np.where(rng.random((size, size)) < hole_probability, "H", "F")
        start, goal = rng.choice(size * size, 2, replace=False)
        cells.flat[start], cells.flat[goal] = "S", "G"
        desc = tuple("".join(row) for row in cells)
        moves = shortest_path(desc)
        if moves is not None and distances[0] <= moves <= distances[1]:
            return desc
    raise ConfigError(
        "no such lake turned up", found=f"size {size}, hole_probability {hole_probability}, distances {distances}",
        expected="lakes to draw from", setting="rollout.environment_options.distances, .hole_probability or .size",
    )  # fmt: skip


def shortest_path(desc: Sequence[str]) -> int | None:
    """Moves on the shortest path from S to G that avoids holes (breadth first), or None where there is none."""
    start = _find(desc, "S")
    moves = {start: 0}
    queue = deque([start])
    while queue:
        row, column = queue.popleft()
        if desc[row][column] == "G":
            return moves[row, column]
        for step_row, step_column in STEPS.values():
            cell = (row + step_row, column + step_column)
            inside = 0 <= cell[0] < len(desc) and 0 <= cell[1] < len(desc[0])
            if inside and cell not in moves and desc[cell[0]][cell[1]] != "H":
                moves[cell] = moves[row, column] + 1
                queue.append(cell)
    return None


def _find(desc: Sequence[str], letter: str) -> tuple[int, int]:
    found = [(r, c) for r, row in enumerate(desc) for c, cell in enumerate(row) if cell == letter]
    if len(found) != 1:
        raise ConfigError(f"a lake needs exactly one {letter}", field="desc", found=len(found), expected=1)
    return found[0]


class FrozenLakeTask(MapTask):
    """Random frozen lakes with random start and goal. Evaluation maps are never trained on.

    Args:
        size: cells of a side.
        hole_probability: chance of each other cell to be a hole.
        distances: least and greatest moves of the shortest safe path.
        view: see `FrozenLakeText`.
        step_reward: reward of a move that ends nothing.
        hole_reward: reward of falling in.
        invalid_reward: reward of a turn whose action could not be read.
        evaluation_maps: how many maps are set aside.
        maps_per_prompt: episodes that share one map in an iteration.
        blank: hide every observation (a control).
        seed: seed of all maps.

    Raises:
        ConfigError: the options describe no lake, or none beside those that are to be set aside.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        hole_probability: float = 0.2,
        distances: tuple[int, int] = (1, 6),
        view: Literal["cells", "moves"] = "cells",
        step_reward: float = 0.0,
        hole_reward: float = 0.0,
        invalid_reward: float = 0.0,
        evaluation_maps: int = 256,
        maps_per_prompt: int = 1,
        blank: bool = False,
        seed: int = 0,
    ) -> None:
        if not 2 <= size <= MAX_LAKE_SIZE or not 1 <= distances[0] <= distances[1] or distances[0] >= size * size:
            raise ConfigError(
                "no such lake", found=f"size {size}, distances {tuple(distances)}",
                expected=f"size 2..{MAX_LAKE_SIZE}, 1 <= least <= greatest, least < size * size",
                setting="rollout.environment_options.distances or .size",
            )  # fmt: skip
        self._draw: dict[str, Any] = {
            "size": size, "hole_probability": hole_probability, "distances": tuple(distances),
        }  # fmt: skip
        self._view: Literal["cells", "moves"] = view
        self._rewards, self._invalid = (1.0, hole_reward, step_reward), invalid_reward
        super().__init__(
            lake_vocabulary(), evaluation_maps=evaluation_maps, maps_per_prompt=maps_per_prompt, blank=blank, seed=seed
        )
        # Refuses options that leave nothing to train on.
        self.training_specs(0, 1)

    def draw_map(self, rng: np.random.Generator) -> Map:
        """See `random_lake`."""
        return random_lake(rng, **self._draw)

    def make_world(self, desc: Map) -> FrozenLakeText:
        """A lake of this map."""
        return FrozenLakeText(
            desc, self.vocabulary, view=self._view, reward_schedule=self._rewards, invalid_reward=self._invalid
        )

    def too_few(self, found: int, wanted: int) -> ConfigError:
        """Names how many lakes were drawn, and the setting."""
        return ConfigError(
            "there are too few lakes", found=f"{found} of {wanted} after {DRAWS_PER_MAP * wanted} draws",
            expected="more than are set aside", setting="rollout.environment_options.evaluation_maps",
        )  # fmt: skip
