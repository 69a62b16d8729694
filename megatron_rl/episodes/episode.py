"""One episode in flight: its tokens so far and how it may end; `lockstep` and `concurrent` drive it.

Invariants of every recorded trajectory:

* Its tokens are exactly what was observed or sampled, in order; it ends with a sampled token. An episode that nothing
  was sampled in holds its first observation (or nothing, when the environment failed to start). An observation that no
  action followed is otherwise never among them: after a truncation it is `boundary_tokens`, else it is dropped.
* One action is one turn, in however many calls it was sampled; K turns have K `turn_rewards`; `reward` (a terminal
  reward on top of them) is 0. Each token carries the weight version of the call that sampled it.
* `truncated` and `terminated` exclude each other. A cut in the middle of an action leaves the environment untouched:
  nothing new was seen (`boundary_tokens` is empty) and the turn earns 0.
* `routes` keeps the row that was used when a token was first an input. Rows that a later call computed differently
  (a prefix prefilled again, after a weight change for instance) are counted in `metadata["route_conflicts"]`.

Metadata of a trajectory: `seed`, `success`, `invalid_actions`, `repeated_actions`, `route_conflicts`, `interruptions`
(calls that an update of the weights ended early), `greedy`, `seconds` (from the start to the end, waiting for the
engine included), `start_turn` where the start was staggered and, after an error, `error`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config.rollout import RepetitionConfig, RolloutConfig
from megatron_rl.engines import Generation
from megatron_rl.environments.base import EpisodeSpec, StepResult, ToolError
from megatron_rl.errors import ConfigError, EngineAnswerError, RolloutError
from megatron_rl.rollouts.schema import OUTCOMES, Trajectory

CONTEXT_SETTING = "batching.token_budget, or a model with more positions"
"""What bounds the tokens of an episode."""


@dataclass(frozen=True)
class EpisodeLimits:
    """What ends an episode early.

    Raises:
        ConfigError: a limit is below 1.
    """

    max_turns: int
    """Turns of an episode; one that needs more is `truncated_turns`."""
    max_action_tokens: int
    """Sampled tokens of a turn, stop token included; an action cut there is passed to the environment as it is."""
    context_limit: int
    """Most tokens of an episode; one that needs more is `truncated_length`."""
    repetition: RepetitionConfig | None = None
    """When an episode counts as stuck; it is truncated, as `repetition`, after the turn that shows it. None: never."""

    def __post_init__(self) -> None:
        settings = {
            "max_turns": "rollout.max_turns",
            "max_action_tokens": "rollout.max_action_tokens",
            "context_limit": CONTEXT_SETTING,
        }
        for name, setting in settings.items():
            if (found := getattr(self, name)) < 1:
                raise ConfigError("limit of an episode", field=name, found=found, expected=">= 1", setting=setting)

    @classmethod
    def of(cls, rollout: RolloutConfig, context_limit: int) -> EpisodeLimits:
        """The limits that a configuration sets.

        Args:
            context_limit: most tokens of an episode: the smaller of the trainer's token budget and the engine's limit.
        """
        return cls(rollout.max_turns, rollout.max_action_tokens, context_limit, rollout.repetition)


def is_stuck(rule: RepetitionConfig, actions: Sequence[tuple[int, ...]], stop_tokens: Sequence[int]) -> bool:
    """Whether the last action repeats those before it, or itself, as often as the rule allows.

    Args:
        rule: how much repetition is too much.
        actions: all actions played so far, at least one.
        stop_tokens: ids that end an action; one at the end of an action is no part of its n-grams.
    """
    last, n = actions[-1], rule.identical_actions
    if n and actions[-n:] == [last] * n:
        return True
    body = last[:-1] if last[-1] in stop_tokens else last
    return any(_ends_with_repeats(body, n, rule.ngram_times) for n in range(1, rule.ngram + 1))


def _ends_with_repeats(tokens: tuple[int, ...], n: int, times: int) -> bool:
    return len(tokens) >= n * times and tokens[-n * times :] == tokens[-n:] * times


def check_generation(generation: Generation, prompt_length: int, budget: int) -> None:
    """Refuse a generation that could not be recorded truthfully.

    Args:
        generation: what an engine returned.
        prompt_length: P, tokens of the prompt.
        budget: most tokens that were requested.

    Raises:
        EngineAnswerError: no token or too many, log-probs of another length or not finite, routes of another length
            than P + n - 1.
    """
    n = len(generation.tokens)
    if not 1 <= n <= budget:
        raise EngineAnswerError("engine returned a wrong number of tokens", found=n, expected=f"1..{budget}")
    if generation.logprobs.shape != (n,) or not np.isfinite(generation.logprobs).all():
        raise EngineAnswerError(
            "engine did not return a log-prob for each token", field="logprobs",
            found=generation.logprobs.tolist(), expected=f"{n} finite values",
        )  # fmt: skip
    if generation.routes is not None and generation.routes.shape[1] != prompt_length + n - 1:
        raise EngineAnswerError(
            "engine returned routes for another number of tokens", field="routes",
            found=generation.routes.shape[1], expected=f"{prompt_length + n - 1} rows (prompt + sampled - 1)",
        )  # fmt: skip


class Episode:
    """One episode in flight; `outcome` is None as long as it runs.

    Call `begin` with the first observation, then alternate: `record` with each generation of the engine and, whenever
    it returns an action, `advance` with the environment's result.

    Args:
        spec: which episode it is.
        limits: what ends it early.
        greedy: noted in the metadata.
    """

    def __init__(self, spec: EpisodeSpec, limits: EpisodeLimits, greedy: bool) -> None:
        self.spec, self.limits = spec, limits
        self.tokens: list[int] = []
        self.stop_tokens: tuple[int, ...] = ()
        self._turn_id: list[int] = []
        self._logprobs: list[float] = []
        self._version: list[int] = []
        self._turn_rewards: list[float] = []
        self._actions: list[tuple[int, ...]] = []
        self._routes: np.ndarray | None = None
        self._boundary: list[int] | None = None
        self._turn_start: int | None = None  # None: no action is being sampled
        self._acted = 0
        self.outcome: str | None = None
        self._reward_vector: np.ndarray | None = None
        self.terminated = self.truncated = False
        self._metadata: dict[str, Any] = {
            "seed": spec.seed, "success": False, "invalid_actions": 0, "repeated_actions": 0, "route_conflicts": 0,
            "interruptions": 0, "greedy": greedy,
        }  # fmt: skip
        self._started = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether the episode goes on."""
        return self.outcome is None

    @property
    def began(self) -> bool:
        """Whether anything was sampled."""
        return bool(self._turn_rewards)

    @property
    def budget(self) -> int:
        """Tokens that may still be sampled for the current action; 0 or less: the context is full."""
        start = len(self.tokens) if self._turn_start is None else self._turn_start
        return start + self._room(start) - len(self.tokens)

    def _room(self, start: int) -> int:
        return min(self.limits.max_action_tokens, self.limits.context_limit - start)

    def begin(self, observation: Sequence[int], stop_tokens: Sequence[int]) -> None:
        """Take the first observation, and the ids that end an action.

        An observation that leaves no room for an action ends the episode as `truncated_length`; one that is not a list
        of token ids ends it as `environment_error`.
        """
        try:
            first = as_tokens(observation)
            self.stop_tokens = tuple(int(token) for token in stop_tokens)
            if not first:
                raise RolloutError("the first observation is empty", field="tokens", found=0, expected=">= 1 token")
        except Exception as error:  # a user's environment may return anything
            self.fail(error)
            return
        self._observe(first)
        if self.budget < 1:
            self._metadata["error"] = f"the first observation has {len(first)} tokens and leaves no room for an action"
            self._truncate("truncated_length", [])

    def record(self, generation: Generation) -> tuple[int, ...] | None:
        """Append the result of one engine call.

        Returns:
            The action, for the environment to play; None if there is more to sample or the episode is over.

        Raises:
            EngineAnswerError: see `check_generation`.
        """
        check_generation(generation, len(self.tokens), self.budget)
        if self._turn_start is None:
            self._turn_start = len(self.tokens)
            self._turn_rewards.append(0.0)
        self._append(generation)
        if generation.interrupted and self.budget > 0 and self.tokens[-1] not in self.stop_tokens:
            self._metadata["interruptions"] += 1
            return None
        start, self._turn_start, self._acted = self._turn_start, None, len(self.tokens)
        action = tuple(self.tokens[start:])
        if action[-1] not in self.stop_tokens and len(action) == self._room(start) < self.limits.max_action_tokens:
            self._truncate("truncated_length", [])
            return None
        return action

    def advance(self, action: tuple[int, ...], result: StepResult) -> None:
        """Append the environment's result of the action; one that cannot be recorded ends the episode, see `fail`."""
        try:
            observation, ending = as_tokens(result.observation), _ending(result)
            self._count(action, result)
        except Exception as error:  # as in begin
            self.fail(error)
            return
        if result.terminated:
            self.outcome, self.terminated = ending or "completed", True
        elif result.truncated or len(self._turn_rewards) == self.limits.max_turns:
            self._truncate(ending or "truncated_turns", observation)
        elif self.limits.repetition and is_stuck(self.limits.repetition, self._actions, self.stop_tokens):
            self._truncate("repetition", observation)
        elif len(self.tokens) + len(observation) >= self.limits.context_limit:
            self._truncate("truncated_length", observation)
        else:
            self._observe(observation)

    def fail(self, error: BaseException) -> None:
        """End the episode with an exception of its environment."""
        self.outcome = "tool_error" if isinstance(error, ToolError) else "environment_error"
        self.terminated = self.outcome == "tool_error"
        self._metadata["error"] = _reason(error)

    def abort(self, error: Exception) -> None:
        """End the episode because the engine returned nothing usable."""
        self._unseen()
        self.outcome = "aborted"
        self._metadata["error"] = _reason(error)

    def time_out(self) -> None:
        """Truncate the episode because its wall-clock time ran out while the engine was sampling."""
        self._truncate("timeout", self._unseen())

    def trajectory(self) -> Trajectory:
        """The recorded trajectory. Only after `outcome` is set."""
        turn_id = np.asarray(self._turn_id, np.int16)
        self._metadata["seconds"] = round(time.monotonic() - self._started, 6)
        return Trajectory(
            trajectory_id=self.spec.trajectory_id,
            prompt_id=self.spec.prompt_id,
            group_id=self.spec.group_id,
            tokens=np.asarray(self.tokens, np.int32),
            action_mask=turn_id >= 0,
            turn_id=turn_id,
            logprobs=np.asarray(self._logprobs, np.float32),
            version=np.asarray(self._version, np.int32),
            turn_rewards=np.asarray(self._turn_rewards, np.float32),
            reward=0.0,
            reward_vector=self._reward_vector,
            outcome=str(self.outcome),
            terminated=self.terminated,
            truncated=self.truncated,
            boundary_tokens=None if self._boundary is None else np.asarray(self._boundary, np.int32),
            routes=self._routes,
            metadata=self._metadata,
        )

    def _observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self._turn_id += [-1] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._version += [0] * len(tokens)

    def _append(self, generation: Generation) -> None:
        n = len(generation.tokens)
        self._merge_routes(generation.routes)
        self.tokens += generation.tokens.tolist()
        self._turn_id += [len(self._turn_rewards) - 1] * n
        self._logprobs += generation.logprobs.tolist()
        self._version += [generation.version] * n

    def _merge_routes(self, routes: np.ndarray | None) -> None:
        """Append the rows of newly fed tokens; rows of tokens fed before are compared as sets, not replaced."""
        if self._routes is None or routes is None:
            self._routes = routes
            return
        held = self._routes.shape[1]
        # Sorting is slow and rows seldom differ at all.
        layer, row = np.nonzero((routes[:, :held] != self._routes).any(axis=-1))
        different = np.sort(routes[layer, row], axis=-1) != np.sort(self._routes[layer, row], axis=-1)
        self._metadata["route_conflicts"] += int(different.any(axis=-1).sum())
        self._routes = np.concatenate([self._routes, routes[:, held:]], axis=1)

    def _count(self, action: tuple[int, ...], result: StepResult) -> None:
        self._turn_rewards[-1] = _finite(result.reward)
        self._metadata["success"] = bool(result.info.get("success", False))
        self._metadata["invalid_actions"] += bool(result.info.get("invalid", False))
        self._metadata["repeated_actions"] += self._actions[-1:] == [action]
        if result.info.get("reward_vector") is not None:
            self._reward_vector = np.asarray(result.info["reward_vector"], np.float32)
        if "start_turn" in result.info:
            self._metadata["start_turn"] = int(result.info["start_turn"])
        self._actions.append(action)

    def _unseen(self) -> list[int]:
        """Remove the trailing observation that no action followed, unless there is nothing else, and return it."""
        if not self.began or self._turn_start is not None:
            return []
        unseen = self.tokens[self._acted :]
        for column in (self.tokens, self._turn_id, self._logprobs, self._version):
            del column[self._acted :]
        return unseen

    def _truncate(self, outcome: str, boundary: list[int]) -> None:
        self.outcome, self.truncated, self._boundary = outcome, True, boundary


def as_tokens(observation: Sequence[int]) -> list[int]:
    """An observation as a list of ids.

    Raises:
        RolloutError: it is not a flat sequence of non-negative integers.
    """
    if isinstance(observation, (str, bytes)):
        kind: Any = type(observation).__name__
    else:
        ids = np.asarray(observation)
        if ids.size == 0 and ids.ndim == 1:
            return []
        if ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0:
            return ids.tolist()
        kind = f"{ids.dtype}{list(ids.shape)}"
    raise RolloutError("observation is not text", field="observation", found=kind, expected="a list of token ids >= 0")


def _finite(reward: float) -> float:
    value = float(reward)
    if not np.isfinite(value):
        raise RolloutError("reward is not finite", field="reward", found=value, expected="a finite number")
    return value


def _ending(result: StepResult) -> str | None:
    """The outcome code that the environment names."""
    outcome = result.info.get("outcome")
    if outcome is not None and outcome not in OUTCOMES:
        raise RolloutError("unknown outcome", field="info['outcome']", found=outcome, expected=OUTCOMES)
    return outcome


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
