"""The run configuration: typed, frozen, unknown keys refused. Every field says what it does, in which unit, and its
default.

Loaded from YAML with `load_config(path, overrides)`; overrides are dotted (`optimizer.lr=1e-5`). No torch is
imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_rl.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """Where the weights come from and in which precision they are trained."""

    path: str = ""
    """HF checkpoint directory of the policy."""
    critic_path: str = ""
    """HF checkpoint of the critic; empty: the policy's backbone with a fresh value head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Computation dtype; bfloat16 keeps float32 main weights in the optimizer."""
    vocab_multiple: int = Field(1, ge=1)
    """The vocabulary is padded to a multiple of this and of the tensor-parallel size."""


class ParallelConfig(_Section):
    """How one model is cut over ranks. World size = tensor · pipeline · context · data."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks (TP). Sequence parallelism is on whenever TP > 1: MoE layers need it."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages (PP)."""
    virtual_pipeline: int = Field(1, ge=1)
    """Model chunks per stage (VPP, interleaved schedule)."""
    context: int = Field(1, ge=1)
    """Context-parallel ranks (CP): each sequence is cut zigzag over them."""
    expert: int = Field(1, ge=1)
    """Expert-parallel ranks (EP), taken from the data·context·tensor ranks of a stage."""
    expert_tensor: int = Field(1, ge=1)
    """Tensor-parallel ranks inside one expert (ETP)."""
    first_stage_layers: int | None = None
    """Layers of the first stage where stages are uneven."""
    last_stage_layers: int | None = None
    """Layers of the last stage where stages are uneven."""
    pipeline_layout: str | None = None
    """Megatron pipeline layout string, for stages that the two numbers above cannot describe."""
    distributed_optimizer: bool = True
    """Shard main weights, moments and the EWMA anchor over data ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: `selective` the attention core, `full` every layer."""
    phase_offload: bool = False
    """Of actor and critic, only the one being updated holds gradients and optimizer states on the device."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica: TP · PP · CP."""
        return self.tensor * self.pipeline * self.context


class PerformanceConfig(_Section):
    """Megatron's performance switches. Those that break route replay are refused when replay is on."""

    moe_grouped_gemm: bool = False
    """Grouped GEMM experts (needs Transformer Engine)."""
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Token dispatcher; `flex` (DeepEP) is refused with replay until it is verified."""
    moe_permute_fusion: bool = False
    """Fused permutation kernels (Transformer Engine)."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with backward."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with forward; refused with an EWMA anchor, whose swap needs weights in place."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer states on the CPU; refused with an EWMA anchor."""
    fp8: bool = False
    """FP8 GEMMs; refused: the ratio would measure quantisation."""
    gradient_accumulation_fusion: bool = False
    """Fused weight-gradient accumulation (Apex or Transformer Engine)."""


class BatchingConfig(_Section):
    """How sequences become micro-batches."""

    token_budget: int = Field(4096, ge=1)
    """Most tokens in one micro-batch of one data rank (over its context-parallel ranks together)."""
    packed: bool = True
    """Pack sequences end to end; False pads each to the longest of the step."""
    logprob_chunk: int = Field(4096, ge=1)
    """Decisions whose float32 logits exist at one time."""


class OptimizerConfig(_Section):
    """AdamW with decoupled weight decay and clipping on the global gradient norm."""

    lr: float = Field(1e-6, ge=0)
    """Largest learning rate, reached after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate falls linearly to `min_lr` after the warm-up; 0: constant."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate after the decay."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Added to √v̂."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest global gradient norm."""


class AlgorithmConfig(_Section):
    """The objective: advantages, losses, importance correction, anchor, aggregation."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per decision."""
    lam_actor: float = Field(0.95, ge=0, le=1)
    """GAE λ of the policy's advantages."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """GAE λ of the critic's returns."""
    whiten: bool = True
    """Whiten advantages over all policy-loss decisions of the rollout batch."""
    clip_low: float = Field(0.2, gt=0)
    """ε_l: ratios below 1 − ε_l are clipped."""
    clip_high: float = Field(0.2, gt=0)
    """ε_h: ratios above 1 + ε_h are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """c of dual clip for negative advantages; null: off."""
    value_clip: float | None = Field(None, gt=0)
    """ε_V of value clipping; null: off."""
    entropy_coef: float = 0.0
    """β_H of the entropy bonus."""
    kl_reward_coef: float = Field(0.0, ge=0)
    """β_KL of KL shaping in the reward; not together with kl_loss_coef."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """β_KL of the KL loss to the reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL loss."""
    anchor: Literal["recompute", "behaviour", "ewma"] = "ewma"
    """Proximal policy of the ratio: recomputed once, the behaviour policy itself, or the EWMA of weights."""
    ewma_decay: float = Field(0.889, ge=0, lt=1)
    """β of the EWMA; centre of mass β/(1−β) optimizer steps."""
    ewma_ratio_cap: float = Field(100.0, gt=1)
    """Largest π_θ/μ̃ of the decoupled EWMA loss."""
    token_is_cap: float | None = Field(None, gt=0)
    """C of truncated token importance weights π_anchor/μ; null: off."""
    sequence_is_cap: float | None = Field(None, gt=0)
    """C_seq of truncated sequence importance weights; null: off."""
    sequence_is_normalise: bool = False
    """Divide sequence weights by their global mean."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant"] = "token_mean"
    """Loss weight of each decision."""
    aggregation_constant: float | None = Field(None, gt=0)
    """C of the `constant` rule."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a rollout batch is split into, per epoch."""
    actor_epochs: int = Field(1, ge=1)
    """M: passes of the actor over a rollout batch."""
    critic_epochs: int = Field(1, ge=1)
    """K: passes of the critic over a rollout batch."""
    critic_warmup: int = Field(0, ge=0)
    """Iterations in which only the critic learns."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Load-balancing loss, from expert counts of the whole optimizer step: linear in tokens, the same in every
    layout."""
    z_loss_coef: float = Field(0.0, ge=0)
    """Router z-loss."""
    missing_boundary: Literal["error", "drop", "zero"] = "error"
    """What to do with truncated trajectories whose boundary is unknown."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlgorithmConfig:
        if self.kl_reward_coef > 0 and self.kl_loss_coef > 0:
            raise ValueError("kl_reward_coef and kl_loss_coef are different objectives: set one of them to 0")
        if self.aggregation == "constant" and self.aggregation_constant is None:
            raise ValueError("aggregation 'constant' needs aggregation_constant")
        if self.sequence_is_normalise and self.sequence_is_cap is None:
            raise ValueError("sequence_is_normalise needs sequence_is_cap")
        if self.token_is_cap is not None and self.sequence_is_cap is not None:
            raise ValueError("token_is_cap and sequence_is_cap correct the same bias twice: set one of them to null")
        corrected = self.token_is_cap is not None or self.sequence_is_cap is not None
        if self.dual_clip is not None and self.anchor == "ewma" and not corrected:
            raise ValueError(
                "dual_clip bounds the clipped surrogate, which the decoupled loss of anchor 'ewma' is not: "
                "set dual_clip to null, or token_is_cap or sequence_is_cap"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of π_ref are scored."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0


class ReplayConfig(_Section):
    """Rollout Routing Replay (R3)."""

    enabled: bool = True
    """Replay recorded expert routes in every forward that produces a log-prob of the ratio."""
    reference: bool = True
    """Replay in the reference policy's score pass too."""
    min_coverage: float = Field(0.0, ge=0, le=1)
    """Smallest accepted share of required rows that were recorded."""


class RolloutConfig(_Section):
    """What is played, how much of it, and with which sampling."""

    environment: str = "frozen_lake"
    """Name of a text environment."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment."""
    episodes: int = Field(64, ge=1)
    """Episodes per iteration, over all ranks."""
    max_turns: int = Field(10, ge=1)
    """Turns after which an episode is truncated."""
    max_action_tokens: int = Field(1, ge=1)
    """Tokens the policy may sample per turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer scales its logits by the same."""
    on_bad_record: Literal["error", "quarantine"] = "error"
    """Refuse a batch with a bad trajectory, or set the trajectory aside."""
    engine_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the embedded engine; null: that of the model."""


class CheckpointConfig(_Section):
    """When to save, and what to keep."""

    every: int = Field(0, ge=0)
    """Iterations between checkpoints; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    resume: bool = True
    """Continue from the newest complete checkpoint of the run directory."""


class GateConfig(_Section):
    """The step-0 gate: before the first update, trainer and engine must agree on what was sampled."""

    enabled: bool = True
    """Check before the first update."""
    max_k3: float = Field(0.01, gt=0)
    """Largest mean k3 between recomputed and recorded log-probs, nats."""
    max_extreme: float = Field(0.01, ge=0, le=1)
    """Largest share of tokens with a probability ratio beyond 2."""
    max_rescore: float = Field(1e-3, gt=0)
    """Largest |log-ratio| between two scorings with other micro-batches."""


class RunConfig(_Section):
    """A whole run."""

    output: str = "runs/default"
    """Run directory: rollouts, metrics, checkpoints, exports."""
    seed: int = 0
    """Seed of everything that is drawn."""
    iterations: int = Field(100, ge=0)
    """Rollout-and-update rounds."""
    evaluate_every: int = Field(10, ge=0)
    """Iterations between evaluations; 0: only at the end."""
    evaluation_episodes: int = Field(128, ge=1)
    """Greedy episodes of one evaluation."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Weights and precision."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Layout of actor and critic over the ranks."""
    performance: PerformanceConfig = Field(default_factory=PerformanceConfig)
    """Megatron's performance switches."""
    batching: BatchingConfig = Field(default_factory=BatchingConfig)
    """Micro-batches."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The actor's optimizer."""
    critic_optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The critic's optimizer."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The objective."""
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Route replay."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Episodes and sampling."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    gate: GateConfig = Field(default_factory=GateConfig)
    """The step-0 gate."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> RunConfig:
        fast, ewma = self.performance, self.algorithm.anchor == "ewma"
        refused = {
            "performance.fp8": fast.fp8,
            "performance.moe_dispatcher=flex": self.replay.enabled and fast.moe_dispatcher == "flex",
            "performance.moe_permute_fusion": self.replay.enabled and fast.moe_permute_fusion,
            "performance.overlap_grad_reduce": fast.overlap_grad_reduce,
            "performance.overlap_param_gather": ewma and fast.overlap_param_gather,
            "performance.optimizer_cpu_offload": ewma and fast.optimizer_cpu_offload,
        }
        bad = [name for name, on in refused.items() if on]
        if bad:
            raise ValueError(
                f"{', '.join(bad)} would break route replay or the anchor swap: turn off, or turn those off"
            )
        return self


def load_config(path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file and dotted overrides into a RunConfig.

    Args:
        path: YAML file, or None for defaults only.
        overrides: ``key.sub=value`` strings, applied last.

    Raises:
        ConfigError: unreadable file, unknown key, or value of a wrong type; names the key, what was found and expected.
    """
    try:
        base = OmegaConf.load(path) if path is not None else OmegaConf.create({})
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError("the configuration cannot be read", file=path, found=error) from error
    return parse_config(plain, file=path)


def parse_config(plain: Any, file: str | Path | None = None) -> RunConfig:
    """Validate a plain mapping. See `load_config` for errors."""
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise _config_error(error, file) from error


def _config_error(error: ValidationError, file: str | Path | None) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown configuration key '{key}'", file=file, field=key, expected=_nearest(first["loc"]), setting=key
        )
    if first["type"] == "value_error":
        return ConfigError(first["msg"].removeprefix("Value error, "), file=file, field=key or None)
    return ConfigError(
        f"bad value of '{key}'", file=file, field=key, found=repr(first["input"]), expected=first["msg"], setting=key
    )


def _nearest(location: tuple) -> str:
    import difflib

    section: Any = RunConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"'{close[0]}'" if close else "one of " + ", ".join(names)
