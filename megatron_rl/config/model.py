"""Weights, layout, Megatron's switches, micro-batches, route replay, optimizers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.section import Section


class ModelConfig(Section):
    """Where the weights come from and in which precision they are trained."""

    path: str = ""
    """HF checkpoint directory of the policy."""
    critic_path: str = ""
    """HF checkpoint of the critic; empty: the policy's backbone with a fresh value head."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Computation dtype; bfloat16 keeps float32 main weights in the optimizer."""
    vocab_multiple: int = Field(1, ge=1)
    """The vocabulary is padded to a multiple of this and of the tensor-parallel size."""
    mtp: Literal["drop", "keep"] = "drop"
    """Multi-token-prediction layers, which are not trained: exports leave them out, or copy them from `path`."""


class ParallelConfig(Section):
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


class PerformanceConfig(Section):
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


class BatchingConfig(Section):
    """How sequences become micro-batches."""

    token_budget: int = Field(4096, ge=1)
    """Most tokens in one micro-batch of one data rank (over its context-parallel ranks together)."""
    packed: bool = True
    """Pack sequences end to end; False pads each to the longest of the step."""
    logprob_chunk: int = Field(4096, ge=1)
    """Decisions whose float32 logits exist at one time."""


class ReplayConfig(Section):
    """Rollout Routing Replay (R3)."""

    enabled: bool = True
    """Replay recorded expert routes in every forward that produces a log-prob of the ratio."""
    reference: bool = True
    """Replay in the reference policy's score pass too."""
    min_coverage: float = Field(0.0, ge=0, le=1)
    """Smallest accepted share of required rows that were recorded."""


class OptimizerConfig(Section):
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
