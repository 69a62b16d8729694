"""Gymnasium environments as text: observations become words, words become ids of a closed vocabulary.

What a turn looks like, in words::

    <observation> goal down 2 right 1 left ice down hole right ice up wall <act>   (observed)
    right <end>                                                                    (sampled)

Invariants:

* An action that cannot be read leaves the environment as it is: it earns `invalid_reward`, is flagged, the turn passes.
* An observation always ends with `<act>` and an action with `<end>`, so that either can be found in a token stream.
* Two vocabularies with the same words in the same order have the same fingerprint, on every machine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import gymnasium
import numpy as np
import xxhash
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from megatron_rl.errors import ConfigError, RolloutError

OBSERVE, ACT, END, BLANK = "<observation>", "<act>", "<end>", "<blank>"
STRUCTURE_WORDS = (OBSERVE, ACT, END, BLANK)
VOCABULARY_FILE = "vocabulary.json"
"""Beside the weights of a checkpoint whose vocabulary is not a tokenizer's."""


class Vocabulary:
    """A closed list of words; the id of a word is its place in the list.

    Args:
        words: distinct words without white space, in the order of their ids.
        multiple_of: reserved words are appended until the size divides by this (a vocabulary is sharded over ranks).

    Raises:
        ConfigError: a word is repeated, empty, or contains white space.
    """

    def __init__(self, words: Iterable[str], *, multiple_of: int = 1) -> None:
        listed = list(words)
        listed += [f"<reserved_{i}>" for i in range(-len(listed) % multiple_of)]
        for word in listed:
            if word.split() != [word]:
                raise ConfigError("not a single word", field="vocabulary", found=repr(word), expected="no white space")
        self.words: tuple[str, ...] = tuple(listed)
        self._ids = {word: i for i, word in enumerate(listed)}
        if len(self._ids) != len(listed):
            repeated = sorted({word for word in listed if listed.count(word) > 1})
            raise ConfigError("repeated words", field="vocabulary", found=repeated, expected="distinct words")

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Ids of words. Raises RolloutError on a word outside the vocabulary."""
        try:
            return [self._ids[word] for word in words]
        except KeyError as missing:
            raise RolloutError(
                "word outside the vocabulary",
                field="words",
                found=missing.args[0],
                expected=f"one of {len(self)} words",
            ) from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of ids. Raises RolloutError on an id outside [0, len(self))."""
        out = []
        for token in ids:
            if not 0 <= token < len(self.words):
                raise RolloutError(
                    "id outside the vocabulary", field="tokens", found=token, expected=f"0..{len(self) - 1}"
                )
            out.append(self.words[token])
        return out

    @property
    def fingerprint(self) -> str:
        """xxh3-64 (16 hex digits) of the words in order: the `tokenizer_hash` of recorded rollouts."""
        return xxhash.xxh3_64_hexdigest("\n".join(self.words).encode())

    def save(self, path: str | Path) -> None:
        """Write the words as a JSON list."""
        Path(path).write_text(json.dumps(self.words, indent=0), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class StepResult:
    """What one action led to."""

    observation: list[int]
    """Tokens that became visible after the action."""
    reward: float
    """Feedback of this turn."""
    terminated: bool
    """The environment ended."""
    truncated: bool
    """The environment cut the episode short, for instance by a time limit of its own."""
    info: dict[str, Any] = field(default_factory=dict)
    """`invalid` (bool): the action could not be read. `success` (bool): the task is solved. `outcome` (str, of the step
    that ends the episode): the outcome code to record, for instance ``finished`` after an explicit last action."""


class ToolError(Exception):
    """Raised by `step` when the action broke a tool beyond repair: the episode ends with the outcome `tool_error`.

    Such an episode may be trained on, the policy having caused it. Any other exception is an `environment_error`, which
    may not.
    """


class TextEnvironment(Protocol):
    """One episode at a time, token ids in and out.

    Where it has a method `close`, players call it once the episode is over.
    """

    stop_tokens: Sequence[int]
    """Any of them ends an action."""

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Start an episode and return the first observation."""
        ...

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Play the action that these tokens say, the stop token included."""
        ...

    def valid_actions(self) -> list[list[int]]:
        """Every action that can be read now, as tokens."""
        ...


def close_environment(env: TextEnvironment | None) -> None:
    """Call `close` of an environment that has one."""
    close = getattr(env, "close", None)
    if close is not None:
        close()


class GymTextEnvironment(ABC):
    """A `gymnasium.Env` with a discrete action space behind the `TextEnvironment` interface.

    A subclass says how an observation reads (`describe`) and what counts as solved (`solved`).

    Args:
        env: the environment; its rewards are passed on as they are.
        vocabulary: must hold the structure words, the action words and every word of `describe`.
        actions: action word to the environment's action.
        invalid_reward: reward of a turn whose action could not be read.
    """

    def __init__(
        self, env: gymnasium.Env, vocabulary: Vocabulary, actions: Mapping[str, int], *, invalid_reward: float = 0.0
    ) -> None:
        self.env, self.vocabulary, self.invalid_reward = env, vocabulary, invalid_reward
        self._actions = {tuple(vocabulary.encode([word, END])): action for word, action in actions.items()}
        self.stop_tokens = vocabulary.encode([END])
        self._observation: Any = None

    @abstractmethod
    def describe(self, observation: Any) -> list[str]:
        """Words for what the agent sees, structure words left out."""

    @abstractmethod
    def solved(self, observation: Any, reward: float) -> bool:
        """Whether the step that led here solved the task."""

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Start an episode and return the first observation's tokens."""
        self._observation, _ = self.env.reset(seed=seed, options=dict(options) if options else None)
        return self._observed()

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Play one action; tokens that are not exactly an action word and `<end>` let the turn pass."""
        action = self._actions.get(tuple(int(token) for token in action_tokens))
        if action is None:
            return StepResult(self._observed(), self.invalid_reward, False, False, {"invalid": True, "success": False})
        self._observation, reward, terminated, truncated, _ = self.env.step(action)
        reward = float(reward)
        info = {"invalid": False, "success": bool(terminated) and self.solved(self._observation, reward)}
        return StepResult(self._observed(), reward, bool(terminated), bool(truncated and not terminated), info)

    def valid_actions(self) -> list[list[int]]:
        """Each action word followed by `<end>`."""
        return [list(tokens) for tokens in self._actions]

    def _observed(self) -> list[int]:
        return self.vocabulary.encode([OBSERVE, *self.describe(self._observation), ACT])


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
        view: what is around: `cells` names the four neighbour cells, `moves` lists the moves that neither drown nor
            bump (and random valid play chooses among those).
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
        env = FrozenLakeEnv(desc=list(desc), is_slippery=slippery, reward_schedule=reward_schedule)
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


class BlankedEnvironment:
    """A control: the same environment with every observed word but the structure replaced by `<blank>`.

    A policy whose success survives this does not read its observations.
    """

    def __init__(self, inner: GymTextEnvironment) -> None:
        self.inner, self.stop_tokens = inner, inner.stop_tokens
        self._kept = set(inner.vocabulary.encode(STRUCTURE_WORDS))
        (self._blank,) = inner.vocabulary.encode([BLANK])

    def reset(self, seed: int | None, options: Mapping[str, Any] | None = None) -> list[int]:
        """Start the inner episode and blank its first observation."""
        return self._blanked(self.inner.reset(seed, options))

    def step(self, action_tokens: Sequence[int]) -> StepResult:
        """Play the action in the inner environment and blank what it shows."""
        seen = self.inner.step(action_tokens)
        return StepResult(self._blanked(seen.observation), seen.reward, seen.terminated, seen.truncated, seen.info)

    def valid_actions(self) -> list[list[int]]:
        """The inner environment's."""
        return self.inner.valid_actions()

    def _blanked(self, tokens: list[int]) -> list[int]:
        return [token if token in self._kept else self._blank for token in tokens]


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
