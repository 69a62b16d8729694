"""Tasks of random maps: some are set aside for evaluation, training draws fresh ones in each iteration."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import numpy as np

from megatron_rl.environments.base import BlankedEnvironment, EpisodeSpec, GymTextEnvironment, TextEnvironment
from megatron_rl.environments.vocabulary import Vocabulary
from megatron_rl.errors import ConfigError

DRAWS_PER_MAP = 100
"""Draws for each map that is wanted, after which there are taken to be no more."""
Map = tuple[str, ...]
"""Rows of letters, one letter a cell."""


class MapTask(ABC):
    """A `Task` of random maps. Evaluation maps are never trained on.

    Maps are drawn from generators seeded `[seed, 1]` (evaluation) and `[seed, 2, iteration]` (training). A spec's
    prompt and group are the first 12 hexadecimal digits of the sha256 of its map's rows joined by `/`. A subclass sets
    what `draw_map` needs before it calls this constructor, which draws the evaluation maps.

    Args:
        vocabulary: of the environments.
        evaluation_maps: how many maps are set aside.
        maps_per_prompt: episodes that share one map in an iteration.
        blank: hide every observation (a control).
        seed: seed of all maps.

    Raises:
        ConfigError: there are fewer maps than are to be set aside.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, evaluation_maps: int, maps_per_prompt: int, blank: bool, seed: int
    ) -> None:
        self.vocabulary = vocabulary
        self._per_map, self._blank, self._seed = maps_per_prompt, blank, seed
        self._held_out: list[Map] = []
        self._held_out = self._maps(np.random.default_rng([seed, 1]), evaluation_maps, distinct=True)

    @abstractmethod
    def draw_map(self, rng: np.random.Generator) -> Map:
        """One map, from this source of randomness alone."""

    @abstractmethod
    def make_world(self, desc: Map) -> GymTextEnvironment:
        """The environment of a map."""

    @abstractmethod
    def too_few(self, found: int, wanted: int) -> ConfigError:
        """The error to raise where `DRAWS_PER_MAP * wanted` draws gave only `found` maps that may be used."""

    def make_env(self, spec: EpisodeSpec) -> TextEnvironment:
        """The environment of the spec's map, blanked in the control."""
        world = self.make_world(spec.options["map"])
        return BlankedEnvironment(world) if self._blank else world

    def training_specs(self, iteration: int, count: int) -> list[EpisodeSpec]:
        """Fresh maps for each iteration, none of them held out. Raises ConfigError where there are too few."""
        rng = np.random.default_rng([self._seed, 2, iteration])
        maps = self._maps(rng, -(-count // self._per_map))
        return [_spec(f"train-{iteration:06d}-{i:05d}", maps[i // self._per_map]) for i in range(count)]

    def evaluation_specs(self, count: int) -> list[EpisodeSpec]:
        """The held-out maps, over and over where `count` is larger."""
        return [_spec(f"eval-{i:05d}", self._held_out[i % len(self._held_out)]) for i in range(count)]

    def _maps(self, rng: np.random.Generator, count: int, *, distinct: bool = False) -> list[Map]:
        """`count` maps that are not held out."""
        maps: list[Map] = []
        refused = set(self._held_out)
        for _ in range(DRAWS_PER_MAP * count):
            if len(maps) == count:
                break
            desc = self.draw_map(rng)
            if desc not in refused:
                maps.append(desc)
                if distinct:
                    refused.add(desc)
        if len(maps) != count:
            raise self.too_few(len(maps), count)
        return maps


def _spec(name: str, desc: Map) -> EpisodeSpec:
    key = hashlib.sha256("/".join(desc).encode()).hexdigest()[:12]
    return EpisodeSpec(name, prompt_id=key, group_id=key, seed=0, options={"map": desc})
