"""The recorded rollout, token by token.

Axis letters: B trajectories, T raw tokens of the whole batch, N raw tokens of one trajectory, K turns, D decisions,
L MoE layers, E experts, k top-k. Flat arrays are concatenated over trajectories and cut by `[B+1]` offsets.

Invariants (checked by `rollouts.validate`, relied upon everywhere after it):

* `action_mask[0] = 0`: the first token has no logits before it, so it was not sampled.
* `turn_id` is 0, 1, … in order of appearance where `action_mask` is 1, and -1 where it is 0. It decides what a turn is.
* `logprobs` and `version` are meaningful only where `action_mask` is 1.
* Never both `terminated` and `truncated`. `boundary_tokens is None` means unknown; an empty array: nothing new seen.
* `routes[:, i]` are the experts chosen while token i was fed; token N-1 is never fed, hence N-1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

FORMAT_VERSION = 1

OUTCOMES = (
    "completed",
    "finished",
    "truncated_length",
    "truncated_turns",
    "repetition",
    "timeout",
    "tool_error",
    "environment_error",
    "aborted",
)
"""What ended a trajectory: `completed` says that the environment ended it, `finished` that the policy did by an action
for it, `timeout` that its wall-clock time ran out. `environment_error` and `aborted` never enter a loss by default."""

EXCLUDED_OUTCOMES = frozenset({"environment_error", "aborted"})


class ModelShape(Protocol):
    """What a fingerprint takes from a model's configuration; `hf.config.HFModelConfig` has it. Dense: E = k = 0."""

    @property
    def model_type(self) -> str:
        """HF name of the architecture."""
        ...

    @property
    def vocab_size(self) -> int:
        """Unpadded V."""
        ...

    @property
    def num_experts(self) -> int:
        """E."""
        ...

    @property
    def topk(self) -> int:
        """k."""
        ...

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based decoder layers, ascending."""
        ...


@dataclass(frozen=True)
class ModelFingerprint:
    """Which model a rollout's tokens and routes belong to. Two fingerprints are equal or the rollout is refused."""

    architecture: str
    """HF `model_type`, for instance ``qwen3_moe``."""
    vocab_size: int
    """Unpadded vocabulary size V; token ids are in [0, V)."""
    num_experts: int
    """E; 0 for a dense model."""
    topk: int
    """k; 0 for a dense model."""
    moe_layers: tuple[int, ...]
    """0-based decoder layer of each MoE layer, ascending: row l of `routes` is decoder layer `moe_layers[l]`."""
    tokenizer_hash: str
    """xxh3 of the tokenizer's vocabulary, or of the environment adapter's when there is no tokenizer."""

    @classmethod
    def of(cls, model: ModelShape, tokenizer_hash: str) -> ModelFingerprint:
        """The fingerprint of a model's configuration with this tokenizer."""
        return cls(model.model_type, model.vocab_size, model.num_experts, model.topk, model.moe_layers, tokenizer_hash)


@dataclass(frozen=True)
class SamplingTruth:
    """The distribution that tokens were drawn from and that log-probs are of."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    logprobs: Literal["processed", "raw"] = "processed"
    """`processed`: after temperature/top-p/top-k, what was sampled from. `raw`: of the unscaled logits."""


@dataclass(frozen=True)
class RolloutHeader:
    """What all trajectories of a shard share. Stored in the Arrow schema's metadata.

    Example:
        >>> model = ModelFingerprint("qwen3_moe", 151936, num_experts=128, topk=8, moe_layers=(0, 1), tokenizer_hash="")
        >>> header = RolloutHeader(model, SamplingTruth(temperature=0.7), engine="vllm/0.11.0")
        >>> header.fingerprint.topk, header.sampling.logprobs, header.format_version
        (8, 'processed', 1)
    """

    fingerprint: ModelFingerprint
    sampling: SamplingTruth
    engine: str
    """Engine name and version, for instance ``local/transformers-5.24.0``."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Trajectory:
    """One recorded episode. Written by `episodes`, read back by `store`.

    Example:
        A prompt of two tokens and one turn of two, rewarded at the end:

        >>> trajectory = Trajectory(
        ...     trajectory_id="train-0", prompt_id="p0", group_id="p0",
        ...     tokens=np.array([5, 7, 9, 2], np.int32),
        ...     action_mask=np.array([False, False, True, True]),
        ...     turn_id=np.array([-1, -1, 0, 0], np.int16),
        ...     logprobs=np.array([0.0, 0.0, -0.5, -0.1], np.float32),
        ...     version=np.zeros(4, np.int32),
        ...     turn_rewards=np.zeros(1, np.float32),
        ...     reward=1.0, outcome="completed", terminated=True, truncated=False,
        ... )
        >>> trajectory.tokens[trajectory.action_mask].tolist()
        [9, 2]
    """

    trajectory_id: str
    prompt_id: str
    """Trajectories of one prompt share it; prompt_mean weighting is keyed by it."""
    group_id: str
    """Trajectories sampled together for one prompt; group baselines are keyed by it."""
    tokens: np.ndarray
    """int32 [N]."""
    action_mask: np.ndarray
    """bool [N]: 1 only where the policy sampled the token."""
    turn_id: np.ndarray
    """int16 [N]: turn of each sampled token, -1 elsewhere."""
    logprobs: np.ndarray
    """float32 [N], nats: log-prob of the token under the behaviour policy that sampled it; 0 elsewhere."""
    version: np.ndarray
    """int32 [N]: weight version that sampled the token; ignored elsewhere."""
    turn_rewards: np.ndarray
    """float32 [K]: feedback that arrived after each turn."""
    reward: float
    """Terminal reward, paid on the last decision, in addition to `turn_rewards`."""
    outcome: str
    """One of OUTCOMES."""
    terminated: bool
    """The environment ended: the successor value is 0."""
    truncated: bool
    """Cut short (length, turns): the successor value is the critic's at the boundary."""
    boundary_tokens: np.ndarray | None = None
    """int32 [n]: what became visible after the last decision; empty: nothing; None: unknown."""
    reward_vector: np.ndarray | None = None
    """float32 [R]: reward components, recorded but not used here."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [L, N-1, k]: expert ids; the dtype's largest value marks a missing row; None: not recorded."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free-form, JSON-serialisable."""


@dataclass(frozen=True)
class RolloutBatch:
    """Recorded trajectories as flat columns: made by `store.read_batch`, read by `training.score` and `batching`.

    Columns are views of memory-mapped Arrow buffers where one shard allows it. Nothing here is ever written to.

    Example:
        With the header and the trajectory of the examples above, written twice:

        >>> from megatron_rl.rollouts.store import read_batch, write_shard
        >>> _ = write_shard(directory, header, [trajectory, trajectory], name="rank-00000")
        >>> batch = read_batch(directory)
        >>> len(batch), batch.lengths.tolist(), batch.offsets.tolist()
        (2, [4, 4], [0, 4, 8])
        >>> batch.tokens[batch.offsets[1] : batch.offsets[2]].tolist()
        [5, 7, 9, 2]
    """

    header: RolloutHeader
    trajectory_ids: tuple[str, ...]
    """B ids."""
    prompt_ids: tuple[str, ...]
    """B."""
    group_ids: tuple[str, ...]
    """B."""
    offsets: np.ndarray
    """int64 [B+1]: tokens of trajectory b are [offsets[b], offsets[b+1])."""
    tokens: np.ndarray
    """int32 [T]."""
    action_mask: np.ndarray
    """bool [T]."""
    turn_id: np.ndarray
    """int16 [T]."""
    logprobs: np.ndarray
    """float32 [T], nats."""
    version: np.ndarray
    """int32 [T]."""
    turn_offsets: np.ndarray
    """int64 [B+1] into turn_rewards."""
    turn_rewards: np.ndarray
    """float32 [ΣK]."""
    reward: np.ndarray
    """float32 [B]."""
    outcome: tuple[str, ...]
    """B of OUTCOMES."""
    terminated: np.ndarray
    """bool [B]."""
    truncated: np.ndarray
    """bool [B]."""
    boundary_offsets: np.ndarray
    """int64 [B+1] into boundary_tokens."""
    boundary_tokens: np.ndarray
    """int32 [ΣN']: visible after the last decision, the critic's forward includes them."""
    boundary_known: np.ndarray
    """bool [B]: False where the record's boundary_tokens were null."""
    routes: tuple[np.ndarray | None, ...]
    """B views [L, N_b - 1, k] of the mapped file (slicing one touches only the bytes of that slice), or None."""
    sources: tuple[tuple[str, int], ...]
    """B (file, row) pairs, for error messages."""
    metadata: tuple[dict[str, Any], ...] = ()
    """B free-form records, or empty."""
    reward_vectors: tuple[np.ndarray | None, ...] = ()
    """B float32 [R] reward components, None where not recorded, or empty."""

    def __len__(self) -> int:
        return len(self.trajectory_ids)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]: raw tokens of each trajectory."""
        return np.diff(self.offsets)
