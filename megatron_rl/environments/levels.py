"""Builds what a configuration trains on: its task at one or several levels, with staggered starts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.environments.base import Task, close_environment
from megatron_rl.environments.curriculum import LEVEL, Curriculum, TrainingTask, require_level
from megatron_rl.environments.tasks import make_task
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.store import open_shard, shard_paths


def training_tasks(config: RunConfig, task: Task) -> tuple[Task, ...]:
    """What is played at each level; without a curriculum there is one.

    Args:
        config: the run.
        task: what it evaluates: `rollout.environment` with the plain `environment_options`.

    Raises:
        ConfigError: a level cannot be built, has another vocabulary, or nothing to train on; or starts are to be
            staggered in environments that do not list valid actions.
    """
    rollout = config.rollout
    tasks: tuple[Task, ...] = (task,)
    evaluated: frozenset[str] = frozenset()
    if rollout.curriculum.levels:
        tasks = tuple(_level(config, task, number) for number in range(len(rollout.curriculum.levels)))
        evaluated = frozenset(spec.prompt_id for spec in task.evaluation_specs(config.evaluation_episodes))
    if rollout.stagger_turns:
        for played in tasks:
            _require_valid_actions(played)
    elif not evaluated:
        return tasks
    how: dict[str, Any] = {"evaluated": evaluated, "stagger_turns": rollout.stagger_turns, "seed": config.seed}
    trained = tuple(TrainingTask(played, **how) for played in tasks)
    for number, level in enumerate(trained if evaluated else ()):
        _require_episodes(level, number)
    return trained


def make_curriculum(config: RunConfig) -> Curriculum | None:
    """A curriculum at its first level; None where the configuration has no levels."""
    chosen = config.rollout.curriculum
    if not chosen.levels:
        return None
    return Curriculum(len(chosen.levels), promote_at=chosen.promote_at, window=chosen.window)


def curriculum_metrics(level: int, success: float | None) -> dict[str, float]:
    """`curriculum/level`, from 0, and `curriculum/success`, over the window; without the latter where it is None."""
    return {"curriculum/level": float(level)} | ({} if success is None else {"curriculum/success": success})


def count_recorded(curriculum: Curriculum, stream: Path) -> dict[int, int]:
    """Let a new curriculum count everything recorded in a stream, in the order it was recorded in.

    A row whose metadata cannot be read is not counted: the trainer refuses it by `rollout.on_bad_record`.

    Returns:
        Block → level of its recorded episodes.

    Raises:
        ConfigError: they were played at a level that the configuration no longer has.
        RolloutError: a shard is torn.
    """
    blocks: dict[int, int] = {}
    for shard in shard_paths(stream, folders="*"):
        _, batches = open_shard(shard)
        for batch in batches:
            texts, outcomes = (batch.column(name).to_pylist() for name in ("metadata", "outcome"))
            for text, outcome in zip(texts, outcomes, strict=True):
                if (metadata := _readable(text)) is None:
                    continue
                # One at a time, as they were counted when they finished: the level may rise after each.
                curriculum.count([(metadata, outcome)])
                blocks |= {metadata["block"]: metadata[LEVEL]} if LEVEL in metadata else {}
    require_level(max(blocks.values(), default=0), curriculum.levels)
    return blocks


def _readable(metadata: str | None) -> dict[str, Any] | None:
    with suppress(ValueError, TypeError):
        found = json.loads(metadata or "")
        return found if isinstance(found, dict) else None
    return None


def _level(config: RunConfig, task: Task, number: int) -> Task:
    rollout, setting = config.rollout, _setting(number)
    try:
        level = make_task(rollout.environment, rollout.training_options[number])
    except ConfigError as error:
        raise ConfigError(
            f"level {number} of the curriculum cannot be played: {error.what}", file=error.file, row=error.row,
            field=error.field, found=error.found, expected=error.expected, setting=setting,
        ) from error  # fmt: skip
    if level.vocabulary.fingerprint != task.vocabulary.fingerprint:
        raise ConfigError(
            f"level {number} of the curriculum has another vocabulary than the task", field="vocabulary",
            found=level.vocabulary.fingerprint, expected=task.vocabulary.fingerprint, setting=setting,
        )  # fmt: skip
    return level


def _require_episodes(level: Task, number: int) -> None:
    try:
        level.training_specs(0, 1)
    except ConfigError as error:
        raise ConfigError(
            f"level {number} of the curriculum cannot be played: {error.what}", found=error.found,
            expected=error.expected, setting=_setting(number),
        ) from error  # fmt: skip


def _setting(number: int) -> str:
    return f"rollout.curriculum.levels[{number}]"


def _require_valid_actions(task: Task) -> None:
    """Raise ConfigError unless an environment of the task lists actions for a random start to choose among."""
    (spec,) = task.training_specs(0, 1)
    env, started, listed, found = None, False, [], "none"
    try:
        env = task.make_env(spec)
        env.reset(spec.seed, spec.options)
        started = True
        listed = list(env.valid_actions())
    except Exception as error:  # an environment of someone else's raises what it likes
        found = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        close_environment(env)
    # One that does not start ends its own episode only, also here.
    if started and not listed:
        raise ConfigError(
            "starts cannot be staggered: the task's environments list no valid actions", field="valid_actions",
            found=found, expected="actions to choose among", setting="rollout.stagger_turns=0, or rollout.environment",
        )  # fmt: skip
