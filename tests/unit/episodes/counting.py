"""An engine whose every token is a function of the tokens before it, and environments of any length, for the runners.

Because each token follows from its exact prefix, a call made again, cut in two, or made among others gives the same
tokens; and any prefix that differs by one token gives others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import xxhash

from megatron_rl.engines import Generation
from megatron_rl.environments.base import EpisodeSpec, StepResult
from megatron_rl.rollouts import ModelFingerprint, RolloutHeader, SamplingTruth

STOP, VOCABULARY, EXPERTS = 63, 64, 8
MODEL = ModelFingerprint("counting", VOCABULARY, num_experts=EXPERTS, topk=2, moe_layers=(0, 2), tokenizer_hash="none")
HEADER = RolloutHeader(MODEL, SamplingTruth(), engine="counting/1")


def next_token(prefix: Sequence[int]) -> int:
    """One in four is the stop token."""
    drawn = xxhash.xxh3_64_intdigest(np.asarray(prefix, np.int32).tobytes())
    return STOP if drawn % 4 == 0 else 40 + drawn % 20


def logprob_of(prefix: Sequence[int]) -> float:
    return -float(xxhash.xxh3_64_intdigest(np.asarray(prefix, np.int32).tobytes(), 1) % 512) / 256


def routes_of(tokens: Sequence[int]) -> np.ndarray:
    """uint8 [2, N - 1, 2]: experts that follow from the token and its position."""
    first = (np.asarray(tokens[:-1], np.int64) + np.arange(len(tokens) - 1)) % EXPERTS
    rows = np.stack([np.stack([(first + layer) % EXPERTS, (first + layer + 1) % EXPERTS], -1) for layer in range(2)])
    return rows.astype(np.uint8)


class CountingEngine:
    """Takes batches and single calls.

    Args:
        jitter: seconds that single calls take at most, at random.
    """

    def __init__(self, jitter: float = 0.0) -> None:
        self.version, self._jitter, self._random = 0, jitter, random.Random(0)
        self.calls, self.at_once, self.most_at_once = 0, 0, 0

    def sample(self, prompt: Sequence[int], limit: int, stops: Sequence[int]) -> Generation:
        tokens, logprobs = list(prompt), []
        while len(logprobs) < limit and not (logprobs and tokens[-1] in stops):
            logprobs.append(logprob_of(tokens))
            tokens.append(next_token(tokens))
        sampled = np.asarray(tokens[len(prompt) :], np.int32)
        return Generation(sampled, np.asarray(logprobs, np.float32), routes_of(tokens), self.version)

    def generate(self, prompts, max_new_tokens, stop_tokens, greedy=False, streams=None):
        return [self.sample(prompt, max_new_tokens, stop_tokens) for prompt in prompts]

    async def agenerate(self, prompt, max_new_tokens, stop_tokens, greedy=False):
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self._random.uniform(0, self._jitter))
            return self.sample(prompt, max_new_tokens, stop_tokens)
        finally:
            self.at_once -= 1


class CountingEnvironment:
    """Ends after `length` turns; its observations are a function of its name, the turn and the action."""

    def __init__(self, name: int, length: int, ending: str = "terminated") -> None:
        self.name, self.length, self.ending = name, length, ending
        self.stop_tokens, self.turn, self.closed = [STOP], 0, 0

    def reset(self, seed, options=None):
        self.turn = 0
        return [self.name % 30, 30 + self.name // 30 % 10]

    def step(self, action_tokens):
        self.turn += 1
        over = self.turn >= self.length
        shown = [sum(action_tokens) % 40] * (1 + self.turn % 3)
        ends = {"terminated": over and self.ending == "terminated", "truncated": over and self.ending == "truncated"}
        return StepResult(shown, self.turn / 8, **ends, info={"success": over, "invalid": self.turn % 2 == 0})

    def valid_actions(self):
        return [[41, STOP], [42, 43, STOP]]

    def close(self):
        self.closed += 1


def specs_of(lengths: Sequence[int], **options) -> list[EpisodeSpec]:
    """One episode of each length, in groups of two."""
    return [
        EpisodeSpec(f"t{i}", f"p{i // 2}", f"g{i // 2}", seed=i, options={"name": i, "length": n, **options})
        for i, n in enumerate(lengths)
    ]


def counting_environment(spec: EpisodeSpec) -> CountingEnvironment:
    return CountingEnvironment(spec.options["name"], spec.options["length"], spec.options.get("ending", "terminated"))
