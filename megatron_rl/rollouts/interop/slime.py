"""slime's samples (`Sample.to_dict()`) to trajectories and back.

A sample holds one sequence: `tokens` = prompt + response, of which the last `response_length` are the response;
`loss_mask`, `rollout_log_probs` run over the response; `rollout_routed_experts` over all tokens but the last. A run of
1s in the loss mask is a turn.

What a sample cannot say (turn rewards, weight version per token, what was seen at a truncation, ids) goes into one more
key, `megatron_rl`, which slime carries along unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.rollouts.interop.record import ImportOptions, Line, encode_routes
from megatron_rl.rollouts.schema import EXCLUDED_OUTCOMES, Trajectory

OWN = "megatron_rl"
_STATUS: dict[str, dict[str, Any]] = {
    "completed": {"outcome": "completed", "terminated": True, "truncated": False},
    "truncated": {"outcome": "truncated_length", "terminated": False, "truncated": True},
    "aborted": {"outcome": "aborted", "terminated": False, "truncated": False},
    # Tool, service and parser failures alike: not told apart, so not trained on.
    "failed": {"outcome": "environment_error", "terminated": False, "truncated": False},
}
_OWN_TEXTS = ("trajectory_id", "prompt_id", "group_id", "outcome")
_OWN_FLAGS = ("terminated", "truncated")


def from_sample(line: Line, options: ImportOptions) -> Trajectory:
    """One sample as a trajectory.

    Masked response tokens are taken for observations: a sample does not say whether the policy sampled them.
    """
    tokens = line.integers("tokens")
    prompt = len(tokens) - line.integer("response_length")
    if not 1 <= prompt <= len(tokens):
        raise line.fault("no prompt, or no response", "response_length", len(tokens) - prompt, f"0..{len(tokens) - 1}")
    mask, logprobs = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
    response = len(tokens) - prompt
    mask[prompt:] = True if line.get("loss_mask") is None else line.flags("loss_mask", response)
    logprobs[prompt:] = np.where(mask[prompt:], line.floats("rollout_log_probs", response), 0)
    common = {
        "tokens": tokens,
        "action_mask": mask,
        "logprobs": logprobs,
        "routes": line.routes("rollout_routed_experts", options, max(len(tokens) - 1, 0)),
    }
    if line.get(OWN) is not None:
        return _own(line, line.object(OWN), common)
    return _foreign(line, options, common)


def _foreign(line: Line, options: ImportOptions, common: dict[str, Any]) -> Trajectory:
    status = line.get("status")
    if status not in _STATUS:
        raise line.fault("sample is not finished, or of an unknown status", "status", status, ", ".join(_STATUS))
    ending = dict(_STATUS[status])
    if line.get("remove_sample"):
        ending |= {"outcome": "aborted", "terminated": False, "truncated": False}
    turn_id = turns_of(common["action_mask"])
    index, group = line.get("index"), line.get("group_index")
    prompt_id = line.name if group is None else str(group)
    return Trajectory(
        trajectory_id=line.name if index is None else f"{line.name.partition(':')[0]}:{index}",
        prompt_id=prompt_id,
        group_id=prompt_id,
        **common,
        turn_id=turn_id,
        version=_versions(line, options, turn_id),
        turn_rewards=np.zeros(turn_id.max(initial=-1) + 1, np.float32),
        reward=reward_of(line, options),
        **ending,
        # A trailing observation is among the tokens already: nothing was seen beyond them.
        boundary_tokens=np.empty(0, np.int32) if ending["truncated"] else None,
        metadata={**line.metadata(), "status": status, "remove_sample": bool(line.get("remove_sample"))},
    )


def turns_of(mask: np.ndarray) -> np.ndarray:
    """int16 [N]: number of each run of 1s of `mask` bool [N], -1 elsewhere."""
    opens = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(opens) - 1, -1).astype(np.int16)


def _versions(line: Line, options: ImportOptions, turn_id: np.ndarray) -> np.ndarray:
    turns = int(turn_id.max(initial=-1)) + 1
    found = line.get("weight_versions") or []
    if options.version is not None or turns == 0:
        numbers = [options.version or 0]
    else:
        numbers = [version_number(line, "weight_versions", version) for version in found]
    if len(set(numbers)) == 1:
        numbers = numbers[:1] * turns
    if len(numbers) != turns:
        raise line.fault(
            "weight versions cannot be assigned to tokens", "weight_versions", found,
            f"one version, or one for each of the {turns} turns", "--version",
        )  # fmt: skip
    return np.where(turn_id >= 0, np.asarray([*numbers, 0], np.int32)[turn_id], 0).astype(np.int32)


def version_number(line: Line, name: str, value: Any) -> int:
    """A weight version; engines report them as text."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 2**31:
        raise line.fault("weight version is no number", name, value, "a whole number below 2^31", "--version")
    return number


def reward_of(line: Line, options: ImportOptions) -> float:
    """The scalar reward of a record."""
    reward = line.get("reward")
    if isinstance(reward, dict):
        if options.reward_key not in reward:
            raise line.fault(
                "several rewards", "reward", options.reward_key, f"one of {sorted(reward)}", "--reward-key"
            )
        reward = reward[options.reward_key]
    if reward is None and options.missing_reward is not None:
        return options.missing_reward
    if reward is None or not isinstance(reward, (bool, int, float, np.number)):
        raise line.fault("no reward", "reward", reward, "a number", "--missing-reward")
    return float(np.float32(reward))


def _own(line: Line, own: Line, common: dict[str, Any]) -> Trajectory:
    length = len(common["tokens"])
    texts = {name: own.get(name) for name in _OWN_TEXTS}
    flags = {name: own.get(name) for name in _OWN_FLAGS}
    for values, kind in ((texts, str), (flags, bool)):
        for name, value in values.items():
            if not isinstance(value, kind):
                raise own.fault("field is missing or of another type", name, value, kind.__name__)
    reward = own.get("reward")
    if not isinstance(reward, (int, float)):
        raise own.fault("field is missing or no number", "reward", reward, "a number")
    return Trajectory(
        **texts,
        **flags,
        **common,
        turn_id=own.integers("turn_id", np.int16, length),
        version=own.integers("version", np.int32, length),
        turn_rewards=own.floats("turn_rewards"),
        reward=float(reward),
        boundary_tokens=None if own.get("boundary_tokens") is None else own.integers("boundary_tokens"),
        reward_vector=None if own.get("reward_vector") is None else own.floats("reward_vector"),
        metadata=line.metadata(),
    )


def to_sample(trajectory: Trajectory, index: int, group_index: int) -> dict[str, Any]:
    """A trajectory as a sample that JSON can hold; log-probs of tokens that nobody sampled are not kept.

    Args:
        index, group_index: slime's numbers of the sample and of its group.
    """
    sampled = np.flatnonzero(trajectory.action_mask)
    first = int(sampled[0]) if len(sampled) else len(trajectory.tokens)
    turns = [trajectory.version[trajectory.turn_id == k] for k in range(len(trajectory.turn_rewards))]
    routes = trajectory.routes
    return {
        "group_index": group_index,
        "index": index,
        "prompt": "",
        "tokens": trajectory.tokens.tolist(),
        "response": "",
        "response_length": len(trajectory.tokens) - first,
        "label": None,
        "reward": trajectory.reward + float(trajectory.turn_rewards.sum()),
        "loss_mask": trajectory.action_mask[first:].astype(int).tolist(),
        "weight_versions": [str(version[-1]) for version in turns if len(version)],
        "rollout_log_probs": np.where(trajectory.action_mask, trajectory.logprobs, 0)[first:].tolist(),
        "rollout_routed_experts": None if routes is None else encode_routes(routes),
        "remove_sample": trajectory.outcome in EXCLUDED_OUTCOMES,
        "status": _status(trajectory),
        "metadata": trajectory.metadata,
        OWN: {
            **{name: getattr(trajectory, name) for name in (*_OWN_TEXTS, *_OWN_FLAGS, "reward")},
            **{name: _listed(getattr(trajectory, name)) for name in
               ("turn_id", "version", "turn_rewards", "boundary_tokens", "reward_vector")},
        },
    }  # fmt: skip


def _listed(values: np.ndarray | None) -> Sequence[Any] | None:
    return None if values is None else values.tolist()


def _status(trajectory: Trajectory) -> str:
    if trajectory.outcome == "aborted":
        return "aborted"
    if trajectory.outcome in ("environment_error", "tool_error"):
        return "failed"
    return "truncated" if trajectory.truncated else "completed"
