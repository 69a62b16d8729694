"""Interfaces: an environment is an episode in token ids; a task says which episodes there are.

Invariant of the text environments of this package: an action that cannot be read leaves the environment as it is, earns
`invalid_reward`, is flagged, and the turn passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import xxhash

from megatron_rl.environments.vocabulary import ACT, BLANK, END, OBSERVE, STRUCTURE_WORDS, Vocabulary


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
    """Raised by `step` when the action broke a tool for good: the episode ends with the outcome `tool_error`.

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
        self.stop_tokens: Sequence[int] = vocabulary.encode([END])
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


class BlankedEnvironment:
    """A control: the same environment with every observed word but the structure replaced by `<blank>`.

    A policy whose success survives this does not read its observations.
    """

    def __init__(self, inner: GymTextEnvironment) -> None:
        self.inner = inner
        self.stop_tokens: Sequence[int] = inner.stop_tokens
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


class Task(Protocol):
    """A task. Specs are pure functions of their arguments: ranks agree on them without communication."""

    vocabulary: Vocabulary

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The environment of one episode."""
        ...

    def training_specs(self, iteration: int, count: int) -> list[EpisodeSpec]:
        """`count` episodes of a training iteration."""
        ...

    def evaluation_specs(self, count: int) -> list[EpisodeSpec]:
        """`count` episodes that training never plays."""
        ...


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play."""

    trajectory_id: str
    prompt_id: str
    group_id: str
    seed: int | None = None
    """Given to the environment's `reset`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Read by `make_env`, for instance the map or the start state."""

    @property
    def stream(self) -> int:
        """Seed of its own random stream, in [0, 2^64), for engines that sample each episode separately."""
        return xxhash.xxh3_64_intdigest(self.trajectory_id.encode())
