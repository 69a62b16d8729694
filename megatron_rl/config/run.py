"""A whole run: all sections, and what contradicts across them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.model import (
    BatchingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
    ReplayConfig,
)
from megatron_rl.config.rollout import FirstStepCheckConfig, RolloutConfig
from megatron_rl.section import Section


class CheckpointConfig(Section):
    """When to save, and what to keep."""

    every: int = Field(0, ge=0)
    """Iterations between checkpoints; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of iterations divisible by this are kept for good; 0: none."""
    resume: bool = True
    """Continue from the newest complete checkpoint of the run directory."""


class RunConfig(Section):
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
    first_step_check: FirstStepCheckConfig = Field(default_factory=FirstStepCheckConfig)
    """Trainer against engine before the first update."""

    @model_validator(mode="after")
    def _asynchronous_anchor_is_chosen(self) -> RunConfig:
        # Which policy the ratio is taken to decides what stale data means: nobody should get one without asking.
        if self.rollout.staleness and "anchor" not in self.algorithm.model_fields_set:
            raise ValueError(
                f"asynchronous rollouts (rollout.mode={self.rollout.mode}) need an explicit anchor: set "
                "algorithm.anchor to ewma, recompute or behaviour"
            )
        if self.rollout.colocated and not self.parallel.phase_offload:
            raise ValueError("rollout.colocated needs parallel.phase_offload: the engine could not get the memory")
        return self

    @model_validator(mode="after")
    def _no_contradiction(self) -> RunConfig:
        fast, ewma = self.performance, self.algorithm.anchor.name == "ewma"
        refused = {
            "performance.fp8": fast.fp8,
            "performance.moe_dispatcher=flex": self.replay.enabled and fast.moe_dispatcher == "flex",
            "performance.moe_permute_fusion": self.replay.enabled and fast.moe_permute_fusion,
            "performance.overlap_grad_reduce": fast.overlap_grad_reduce,
            "performance.overlap_param_gather": ewma and fast.overlap_param_gather,
            "performance.optimizer_cpu_offload": ewma and fast.optimizer_cpu_offload,
        }
        for options in self.rollout.training_options:
            if reason := _single_responses(self.algorithm, options):
                raise ValueError(reason)
        bad = [name for name, on in refused.items() if on]
        if bad:
            raise ValueError(
                f"{', '.join(bad)} would break route replay or the anchor swap: turn off, or turn those off"
            )
        return self


RESPONSES = ("maps_per_prompt", "responses_per_prompt")
"""Options by which the tasks of this package say how many responses a prompt gets."""


def _single_responses(algorithm: AlgorithmConfig, options: Mapping[str, Any]) -> str | None:
    """Why the task's options do not suit a group method, or None. Where they do not tell, the first batch does."""
    told = next((name for name in RESPONSES if options.get(name) == 1), None)
    if told is None or not algorithm.needs_groups:
        return None
    return (
        f"algorithm.estimator '{algorithm.estimator.name}' compares responses to one prompt, and {told} is 1: set "
        f"rollout.environment_options.{told} to at least 2 (also where a level of rollout.curriculum changes it), or "
        "algorithm.estimator to gae or batch_mean"
    )
