"""A token sequence with the trainer's log-probs: an engine that scores it differently holds other weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_rl.errors import CheckpointError, EngineVersionError
from megatron_rl.files import write_text

CANARY_FILE = "canary.json"


@dataclass(frozen=True)
class Canary:
    """Written by the trainer into a published directory, read when that directory is loaded into an engine."""

    tokens: np.ndarray
    """int32 [N], N >= 2."""
    logprobs: np.ndarray
    """float32 [N], nats: log-prob of each token given those before it, at temperature 1; 0 at the first."""

    def write(self, directory: str | Path) -> Path:
        """Write `canary.json` into a directory, atomically; returns its path."""
        target = Path(directory) / CANARY_FILE
        values = {"tokens": np.asarray(self.tokens).tolist(), "logprobs": np.asarray(self.logprobs).tolist()}
        write_text(target, json.dumps(values) + "\n")
        return target

    @staticmethod
    def read(directory: str | Path) -> Canary | None:
        """The canary of a published directory, None where it has none.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = Path(directory) / CANARY_FILE
        if not file.exists():
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            canary = Canary(np.asarray(values["tokens"], np.int32), np.asarray(values["logprobs"], np.float32))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("damaged canary", file=file, found=error, expected="tokens and logprobs") from error
        shapes = (canary.tokens.shape, canary.logprobs.shape)
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or len(canary.tokens) < 2:
            raise CheckpointError("damaged canary", file=file, found=shapes, expected="two lists of one length >= 2")
        return canary


class Scorer(Protocol):
    """An engine that can score a sequence."""

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [N] log-probs at temperature 1, 0 at the first token."""
        ...


def mean_k3(trainer: np.ndarray, engine: np.ndarray) -> float:
    """Mean of k3 = r - 1 - log r over tokens, where log r = trainer - engine (Schulman, "Approximating KL", 2020).

    NaN if any log-prob is. Nats, >= 0; the first token, which has no prediction, is left out.
    """
    log_ratio = np.asarray(trainer, np.float64)[1:] - np.asarray(engine, np.float64)[1:]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.mean(np.expm1(log_ratio) - log_ratio))


def require_canary(canary: Canary, scores: np.ndarray, max_k3: float, *, who: str) -> float:
    """The mean k3 of the trainer's log-probs against an engine's.

    Args:
        canary: the trainer's log-probs.
        scores: float [N], the engine's log-probs.
        max_k3: bound in nats.
        who: names the engine in the error.

    Raises:
        EngineVersionError: the mean k3 is above `max_k3`, or not a number.
    """
    found = mean_k3(canary.logprobs, scores)
    if not found <= max_k3:
        raise EngineVersionError(
            "the engine does not hold the published weights: it scores the canary differently",
            file=who,
            field="mean k3",
            found=f"{found:.3g}",
            expected=f"<= {max_k3:g}",
            setting="the bound on the canary's mean k3, if the engine's precision is lower",
        )
    return found


def check_canary(engine: Scorer, canary: Canary, *, max_k3: float = 0.01) -> float:
    """Score the canary with an engine; returns the mean k3 of trainer against engine.

    Args:
        engine: holds the weights in question.
        canary: the trainer's log-probs.
        max_k3: bound in nats; bfloat16 engines stay below 0.01, float32 ones below 1e-6.

    Raises:
        EngineVersionError: the mean k3 is above the bound, or not a number.
    """
    return require_canary(canary, engine.score(canary.tokens.tolist()), max_k3, who=type(engine).__name__)
