"""What is played: a task names a vocabulary, builds environments, and draws episodes for training and for
evaluation."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from megatron_rl.engines.environments import (
    MAX_LAKE_SIZE,
    BlankedEnvironment,
    FrozenLakeText,
    TextEnvironment,
    Vocabulary,
    lake_vocabulary,
    random_lake,
)
from megatron_rl.engines.episodes import EpisodeSpec
from megatron_rl.engines.prompts import PromptsTask
from megatron_rl.engines.sokoban import SokobanTask
from megatron_rl.errors import ConfigError

ATTEMPTS = 100
"""Draws for each lake that is wanted, after which there are taken to be no more."""


class Task(Protocol):
    """A task. Specs are pure functions of their arguments, so that ranks agree on them without talking."""

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


class FrozenLakeTask:
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
        self.vocabulary = lake_vocabulary()
        self._draw = {"size": size, "hole_probability": hole_probability, "distances": tuple(distances)}
        self._view, self._rewards = view, (1.0, hole_reward, step_reward)
        self._invalid, self._per_map, self._blank, self._seed = invalid_reward, maps_per_prompt, blank, seed
        self._forbidden: frozenset[tuple[str, ...]] = frozenset()
        self._held_out = self._lakes(np.random.default_rng([seed, 1]), evaluation_maps, distinct=True)
        self._forbidden = frozenset(self._held_out)
        self.training_specs(0, 1)

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """A lake of the spec's map."""
        lake = FrozenLakeText(
            spec.options["map"],
            self.vocabulary,
            view=self._view,
            reward_schedule=self._rewards,
            invalid_reward=self._invalid,
        )
        return BlankedEnvironment(lake) if self._blank else lake

    def training_specs(self, iteration: int, count: int) -> list[EpisodeSpec]:
        """Fresh maps for each iteration, none of them held out."""
        rng = np.random.default_rng([self._seed, 2, iteration])
        lakes = self._lakes(rng, -(-count // self._per_map))
        return [_spec(f"train-{iteration:06d}-{i:05d}", lakes[i // self._per_map]) for i in range(count)]

    def evaluation_specs(self, count: int) -> list[EpisodeSpec]:
        """The held-out maps, over and over where `count` is larger."""
        return [_spec(f"eval-{i:05d}", self._held_out[i % len(self._held_out)]) for i in range(count)]

    def _lakes(self, rng: np.random.Generator, count: int, *, distinct: bool = False) -> list[tuple[str, ...]]:
        """`count` lakes that are not held out."""
        lakes: list[tuple[str, ...]] = []
        seen: set[tuple[str, ...]] = set()
        for _ in range(ATTEMPTS * count):
            if len(lakes) == count:
                break
            lake = random_lake(rng, **self._draw)
            if lake not in self._forbidden and not (distinct and lake in seen):
                lakes.append(lake)
                seen.add(lake)
        if len(lakes) == count:
            return lakes
        raise ConfigError(
            "there are too few lakes", found=f"{len(lakes)} of {count} after {ATTEMPTS * count} draws",
            expected="more than are set aside", setting="rollout.environment_options.evaluation_maps",
        )  # fmt: skip


def _spec(name: str, lake: tuple[str, ...]) -> EpisodeSpec:
    key = hashlib.sha256("/".join(lake).encode()).hexdigest()[:12]
    return EpisodeSpec(name, prompt_id=key, group_id=key, seed=0, options={"map": lake})


TASKS: dict[str, type] = {"frozen_lake": FrozenLakeTask, "prompts": PromptsTask, "sokoban": SokobanTask}


def make_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task by name, or by `package.module:Class` for one of your own.

    Raises:
        ConfigError: unknown name or option.
    """
    kind = TASKS.get(name) or _imported(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(
            f"task '{name}' does not take these options", found=error, setting="rollout.environment_options"
        ) from error


def _imported(name: str) -> type:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "unknown task",
            found=name,
            expected=f"one of {sorted(TASKS)} or package.module:Class",
            setting="rollout.environment",
        ) from error
