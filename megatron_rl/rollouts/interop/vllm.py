"""vLLM's responses: `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` with `return_token_ids`.

Each choice is an episode of one turn. A response says neither reward nor weight version nor, for the last of the three,
the prompt; whoever writes the dump may add `reward`, `weight_version`, `prompt_id`, `group_id` and `prompt_token_ids`
to the response or to a choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.rollouts.interop.record import ImportOptions, Line
from megatron_rl.rollouts.interop.slime import reward_of, version_number
from megatron_rl.rollouts.schema import Trajectory

_FINISH: dict[str, dict[str, Any]] = {
    "stop": {"outcome": "completed", "terminated": True, "truncated": False},
    "length": {"outcome": "truncated_length", "terminated": False, "truncated": True},
    "abort": {"outcome": "aborted", "terminated": False, "truncated": False},
}
_SHARED = ("prompt_token_ids", "prompt_routed_experts", "reward", "weight_version", "prompt_id", "group_id")


def from_response(line: Line, options: ImportOptions) -> Iterator[Trajectory]:
    """One trajectory for each choice."""
    choices = line.get("choices")
    if not isinstance(choices, list) or not choices:
        raise line.fault("no choices", "choices", choices, "a list of at least one")
    response_id = str(line.get("id") or line.get("request_id") or line.name)
    shared = {key: line.get(key) for key in _SHARED if line.get(key) is not None}
    for number, choice in enumerate(choices):
        if not isinstance(choice, dict):
            raise line.fault("choice is no object", f"choices[{number}]", choice, "an object")
        known = {key: value for key, value in choice.items() if value is not None}
        whole = replace(line, values={**shared, **known}, path=f"choices[{number}].")
        yield _choice(whole, options, response_id, number)


def _choice(line: Line, options: ImportOptions, response_id: str, number: int) -> Trajectory:
    prompt, sampled = line.integers("prompt_token_ids"), line.integers("token_ids")
    if not len(prompt) or not len(sampled):
        name = "token_ids" if len(prompt) else "prompt_token_ids"
        raise line.fault("nothing was sampled, or there is no prompt", name, 0, ">= 1 token")
    finish = line.get("finish_reason")
    if finish not in _FINISH:
        raise line.fault("response did not finish", "finish_reason", finish, ", ".join(_FINISH))
    mask = np.concatenate([np.zeros(len(prompt), bool), np.ones(len(sampled), bool)])
    logprobs = np.concatenate([np.zeros(len(prompt), np.float32), _logprobs(line, len(sampled))])
    version = options.version
    if version is None:
        version = version_number(line, "weight_version", line.get("weight_version"))
    return Trajectory(
        trajectory_id=f"{response_id}-{number}",
        prompt_id=str(line.get("prompt_id") or response_id),
        group_id=str(line.get("group_id") or response_id),
        tokens=np.concatenate([prompt, sampled]),
        action_mask=mask,
        turn_id=np.where(mask, 0, -1).astype(np.int16),
        logprobs=logprobs,
        version=np.where(mask, version, 0).astype(np.int32),
        turn_rewards=np.zeros(1, np.float32),
        reward=reward_of(line, options),
        **_FINISH[finish],
        boundary_tokens=np.empty(0, np.int32) if finish == "length" else None,
        routes=_routes(line, options, len(prompt), len(mask) - 1),
        metadata={"finish_reason": finish},
    )


def _logprobs(line: Line, count: int) -> np.ndarray:
    """Completions list `token_logprobs`; chat and generate list an object a token."""
    inner = line.object("logprobs")
    content = inner.get("content")
    if content is None:
        return inner.floats("token_logprobs", count)
    try:
        listed = [entry["logprob"] for entry in content]
    except (TypeError, KeyError) as error:
        raise inner.fault("entry without a log-prob", "content", error, "objects with `logprob`") from error
    return replace(inner, values={"content": listed}).floats("content", count)


def _routes(line: Line, options: ImportOptions, prompt: int, rows: int) -> np.ndarray | None:
    """Prompt and response in one array, or apart: then the prompt's rows are in `prompt_routed_experts`."""
    response = line.reported_routes("routed_experts", options, rows)
    if response is None:
        return None
    before = line.reported_routes("prompt_routed_experts", options, prompt)
    if before is None:
        return line.recorded_routes("routed_experts", response, options, rows)
    if len(before) != prompt or before.shape[1:] != response.shape[1:]:
        expected = f"[{prompt} tokens of the prompt, {', '.join(map(str, response.shape[1:]))}]"
        raise line.fault("routes of prompt and response do not fit", "prompt_routed_experts", before.shape, expected)
    return line.recorded_routes("routed_experts", np.concatenate([before, response]), options, rows)
