"""The run configuration: typed, frozen, unknown keys refused. Every field says what it does, in which unit, and its
default.

Loaded from YAML with `load_config(path, overrides)`; overrides are dotted (`optimizer.lr=1e-5`). No torch is
imported here.
"""

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.load import load_config, parse_config
from megatron_rl.config.model import (
    BatchingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
    ReplayConfig,
)
from megatron_rl.config.rollout import FirstStepCheckConfig, RolloutConfig
from megatron_rl.config.run import CheckpointConfig, RunConfig

__all__ = [
    "AlgorithmConfig",
    "BatchingConfig",
    "CheckpointConfig",
    "FirstStepCheckConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PerformanceConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "load_config",
    "parse_config",
]
