"""Tasks by name. A task has a vocabulary, builds environments, and draws episodes for training and evaluation."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.base import Task
from megatron_rl.environments.frozen_lake import FrozenLakeTask
from megatron_rl.environments.prompts import PromptsTask
from megatron_rl.environments.sokoban import SokobanTask
from megatron_rl.errors import ConfigError

TASKS: dict[str, type] = {"frozen_lake": FrozenLakeTask, "prompts": PromptsTask, "sokoban": SokobanTask}


def make_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task by name, or by `package.module:Class` for one of your own.

    Raises:
        ConfigError: unknown name or option.
    """
    kind = TASKS.get(name) or _imported(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(
            f"task '{name}' does not take these options", found=error, setting="rollout.environment_options"
        ) from error


def _imported(name: str) -> type:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "unknown task",
            found=name,
            expected=f"one of {sorted(TASKS)} or package.module:Class",
            setting="rollout.environment",
        ) from error
