"""From a vLLM's completion to a `Generation`: a completion that does not fit its request is refused.

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
"""vLLM's finish reasons."""


@dataclass(frozen=True)
class CompletionRequest:
    """One sampling call of an engine, sent to one replica.

    Example:
        `CompletionRequest((5, 17, 3), max_new_tokens=8, stop_tokens=(2,))`
    """

    prompt: tuple[int, ...]
    """P >= 1 ids."""
    max_new_tokens: int
    """Most tokens to sample, >= 1."""
    stop_tokens: tuple[int, ...]
    """Ids that end the call, sorted."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""


@dataclass(frozen=True)
class Completion:
    """The result of one request as a replica reports it, unchecked; `to_generation` checks it."""

    tokens: Sequence[int]
    """n sampled ids."""
    logprobs: Sequence[float]
    """n log-probs, nats."""
    finish: str
    """One of the finish reasons above."""
    routes: np.ndarray | None = None
    """int [P + n - 1, decoder layers, k], dense layers as zeros; or, where `prompt_routes` is set, [n - 1, L, k]."""
    prompt_routes: np.ndarray | None = None
    """int [P, L, k] of newer vLLM, which reports MoE layers only; None: older vLLM."""


def to_generation(
    request: CompletionRequest,
    completion: Completion,
    model: HFModelConfig,
    version: int,
    *,
    who: str,
    routes: bool = True,
) -> Generation | None:
    """Check a completion and convert it.

    Args:
        request: what was requested.
        completion: what the replica returned.
        model: shapes and ids are checked against it.
        version: weight version the replica held throughout the call.
        who: names the replica in errors.
        routes: require routes.

    Returns:
        None for a call that was aborted before its first token.

    Raises:
        EngineAnswerError: no or too many tokens, ids outside the vocabulary, log-probs that are missing, NaN, infinite
            or positive, a token after a stop token, an end without a reason; or routes that are absent, too few, too
            many, of another layout, or out of range.
    """
    if completion.finish == ABORTED and not len(completion.tokens):
        return None
    _check_tokens(request, completion, model, who)
    rows = len(request.prompt) + len(completion.tokens) - 1
    return Generation(
        tokens=np.asarray(completion.tokens, np.int32),
        logprobs=np.minimum(np.asarray(completion.logprobs, np.float32), 0.0),
        routes=_routes(completion, model, rows, who) if routes else None,
        version=version,
        interrupted=completion.finish == ABORTED and not _is_complete(request, completion),
    )


def decode_array(text: str | None) -> np.ndarray | None:
    """The array of a base64-encoded `.npy` file, which is how vLLM puts arrays into JSON; None for None.

    Raises:
        EngineAnswerError: the text is not such a file.
    """
    if text is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineAnswerError("unreadable routes", field="routed_experts", found=error, expected="a .npy") from error


def _check_tokens(request: CompletionRequest, completion: Completion, model: HFModelConfig, who: str) -> None:
    tokens, n = np.asarray(completion.tokens), len(completion.tokens)
    if not 1 <= n <= request.max_new_tokens:
        raise _wrong("tokens", n, f"1 to {request.max_new_tokens} tokens", who)
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise _wrong("tokens", f"{tokens.min()}..{tokens.max()}", f"ids in 0..{model.vocab_size - 1}", who)
    if len(completion.logprobs) != n:
        raise _wrong("logprobs", len(completion.logprobs), f"{n}, one for each token", who)
    logprobs = np.asarray(completion.logprobs, np.float64)
    # A certain token's log-prob may be rounded to slightly above 0.
    bad = ~(np.isfinite(logprobs) & (logprobs <= 1e-5))
    if bad.any():
        i = int(bad.argmax())
        raise _wrong("logprobs", f"{logprobs[i]} at token {i}", "finite and <= 0", who)
    if np.isin(tokens[:-1], request.stop_tokens).any():
        raise _wrong("tokens", "a token after a stop token", "the stop token last", who)
    if completion.finish not in (STOPPED, EXHAUSTED, ABORTED) or (
        completion.finish != ABORTED and not _is_complete(request, completion)
    ):
        raise _wrong("finish_reason", f"{completion.finish} after {n} tokens", "a stop token or the limit", who)


def _is_complete(request: CompletionRequest, completion: Completion) -> bool:
    return len(completion.tokens) == request.max_new_tokens or completion.tokens[-1] in request.stop_tokens


def _routes(completion: Completion, model: HFModelConfig, rows: int, who: str) -> np.ndarray:
    """uint8 or uint16 [L, rows, k] from either of vLLM's layouts."""
    if completion.routes is None:
        setting = "start the server with enable_return_routed_experts"
        raise _wrong("routed_experts", "none", f"{rows} rows of routes", who, setting)
    whole, layers = completion.routes, model.num_layers
    if completion.prompt_routes is not None:
        parts, layers = (completion.prompt_routes, completion.routes), len(model.moe_layers)
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
        raise _wrong("routed_experts", f"{int(absent.sum())} missing rows", "a row for every input token", who)
    return routes


def _wrong(field: str, found: Any, expected: Any, who: str, setting: str | None = None) -> EngineAnswerError:
    return EngineAnswerError(
        "a completion does not fit its request", file=who, field=field, found=found, expected=expected, setting=setting
    )


def as_request(
    prompt: Sequence[int], max_new_tokens: int, stop_tokens: Collection[int], greedy: bool
) -> CompletionRequest:
    """A request from integers of any kind, as plain Python integers, which JSON and msgpack accept."""
    stops = tuple(sorted(int(token) for token in stop_tokens))
    return CompletionRequest(tuple(int(token) for token in prompt), int(max_new_tokens), stops, greedy)
