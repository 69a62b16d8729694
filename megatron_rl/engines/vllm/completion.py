"""From what a vLLM said to a `Generation`: nothing is recorded that does not fit the question.

Axis letters: P tokens of the prompt, n generated, L MoE layers, k top-k.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.engines import Generation
from megatron_rl.errors import EngineAnswerError, RouteError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.rollouts.routes import from_engine, missing_rows

STOPPED, EXHAUSTED, ABORTED = "stop", "length", "abort"
"""vLLM's reasons for the end of a call."""


@dataclass(frozen=True)
class CompletionRequest:
    """One call."""

    prompt: tuple[int, ...]
    """P >= 1 ids."""
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    greedy: bool = False


@dataclass(frozen=True)
class Completion:
    """One call's result as a replica reports it, unchecked."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    """One of the reasons above."""
    routes: np.ndarray | None = None
    """[P + n - 1, decoder layers, k], dense layers as zeros; or, where `prompt_routes` is set, [n - 1, L, k]."""
    prompt_routes: np.ndarray | None = None
    """[P, L, k] of newer vLLM, which reports MoE layers only."""


def to_generation(
    question: CompletionRequest,
    answer: Completion,
    model: HFModelConfig,
    version: int,
    *,
    who: str,
    routes: bool = True,
) -> Generation | None:
    """Check an answer and bring it into the recorded form.

    Args:
        model: shapes and ids are checked against it.
        version: weight version the replica held throughout the call.
        who: named in errors.
        routes: require routes.

    Returns:
        None for a call that was cut short before its first token.

    Raises:
        EngineAnswerError: see `_check_tokens`; or routes are absent, too few or too many, of another layout, or out of
            range.
    """
    if answer.finish == ABORTED and not len(answer.tokens):
        return None
    _check_tokens(question, answer, model, who)
    rows = len(question.prompt) + len(answer.tokens) - 1
    return Generation(
        tokens=np.asarray(answer.tokens, np.int32),
        logprobs=np.minimum(np.asarray(answer.logprobs, np.float32), 0.0),
        routes=_routes(answer, model, rows, who) if routes else None,
        version=version,
        interrupted=answer.finish == ABORTED and not _complete(question, answer),
    )


def decode_array(text: str | None) -> np.ndarray | None:
    """A base64 `.npy` file, as vLLM puts arrays into JSON.

    Raises:
        EngineAnswerError: it is none.
    """
    if text is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineAnswerError("unreadable routes", field="routed_experts", found=error, expected="a .npy") from error


def _check_tokens(question: CompletionRequest, answer: Completion, model: HFModelConfig, who: str) -> None:
    """Ids and log-probs pair up, are in range, end where they must.

    Raises:
        EngineAnswerError: no or too many tokens, ids outside the vocabulary, log-probs that are missing, NaN, infinite
            or positive, a token after a stop token, or an end without a reason.
    """
    tokens, n = np.asarray(answer.tokens), len(answer.tokens)
    if not 1 <= n <= question.max_new_tokens:
        raise _wrong("tokens", n, f"1 to {question.max_new_tokens} tokens", who)
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise _wrong("tokens", f"{tokens.min()}..{tokens.max()}", f"ids in 0..{model.vocab_size - 1}", who)
    if len(answer.logprobs) != n:
        raise _wrong("logprobs", len(answer.logprobs), f"{n}, one for each token", who)
    logprobs = np.asarray(answer.logprobs, np.float64)
    # A certain token's log-prob may be rounded to slightly above 0.
    bad = ~(np.isfinite(logprobs) & (logprobs <= 1e-5))
    if bad.any():
        at = int(bad.argmax())
        raise _wrong("logprobs", f"{logprobs[at]} at token {at}", "finite and <= 0", who)
    if np.isin(tokens[:-1], question.stop_tokens).any():
        raise _wrong("tokens", "a token after a stop token", "the stop token last", who)
    if answer.finish not in (STOPPED, EXHAUSTED, ABORTED) or (
        answer.finish != ABORTED and not _complete(question, answer)
    ):
        raise _wrong("finish_reason", f"{answer.finish} after {n} tokens", "a stop token or the limit", who)


def _complete(question: CompletionRequest, answer: Completion) -> bool:
    return len(answer.tokens) == question.max_new_tokens or answer.tokens[-1] in question.stop_tokens


def _routes(answer: Completion, model: HFModelConfig, rows: int, who: str) -> np.ndarray:
    if answer.routes is None:
        setting = "start the server with enable_return_routed_experts"
        raise _wrong("routed_experts", "none", f"{rows} rows of routes", who, setting)
    whole, layers = answer.routes, model.num_layers
    if answer.prompt_routes is not None:
        parts, layers = (answer.prompt_routes, answer.routes), len(model.moe_layers)
        if any(part.ndim != 3 for part in parts) or len({part.shape[1:] for part in parts}) != 1:
            raise _wrong("routed_experts", [part.shape for part in parts], "[P, L, k] and [n - 1, L, k]", who)
        whole = np.concatenate(parts)
    if whole.dtype.kind not in "iu" or whole.shape != (rows, layers, model.topk):
        raise _wrong("routed_experts", f"{whole.dtype} {whole.shape}", f"integers {(rows, layers, model.topk)}", who)
    try:
        routes = from_engine(
            whole, num_layers=model.num_layers, moe_layers=model.moe_layers, num_experts=model.num_experts, rows=rows
        )
    except RouteError as error:
        raise _wrong("routed_experts", error.found, error.expected, who) from error
    if (absent := missing_rows(routes)).any():
        raise _wrong("routed_experts", f"{int(absent.sum())} missing rows", "every fed token's row", who)
    return routes


def _wrong(field: str, found: Any, expected: Any, who: str, setting: str | None = None) -> EngineAnswerError:
    return EngineAnswerError(
        "an answer does not fit its question", file=who, field=field, found=found, expected=expected, setting=setting
    )


def as_request(
    prompt: Sequence[int], max_new_tokens: int, stop_tokens: Collection[int], greedy: bool
) -> CompletionRequest:
    """Plain Python integers, which JSON and msgpack accept."""
    stops = tuple(sorted(int(token) for token in stop_tokens))
    return CompletionRequest(tuple(int(token) for token in prompt), int(max_new_tokens), stops, greedy)
