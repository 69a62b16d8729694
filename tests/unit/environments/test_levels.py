"""From the configuration to what is trained on at each level, and what a restarted rollout process knows of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_rl.config import RunConfig, load_config, parse_config
from megatron_rl.environments.curriculum import START_TURN
from megatron_rl.environments.frozen_lake import FrozenLakeTask, FrozenLakeText, lake_vocabulary, shortest_path
from megatron_rl.environments.levels import count_recorded, make_curriculum, training_tasks
from megatron_rl.environments.tasks import make_task
from megatron_rl.environments.vocabulary import Vocabulary
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.store import write_shard
from tests.unit.rollouts.records import write_tampered
from tests.unit.training.test_streaming import HEADER, trajectory

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.unit.environments.test_levels"
TINY = {"size": 2, "hole_probability": 0.0, "evaluation_maps": 2}


class Worded(FrozenLakeTask):
    """A lake with a further word."""

    def __init__(self, *, word: str = "", **options) -> None:
        super().__init__(**options)
        self.vocabulary = Vocabulary([*lake_vocabulary().words, word]) if word else self.vocabulary


class Silent(FrozenLakeTask):
    """Environments that do not list actions."""

    def make_env(self, spec):
        """A lake that lists nothing."""
        lake = super().make_env(spec)
        lake.valid_actions = lambda: []
        return lake


class Broken(FrozenLakeTask):
    """Environments that do not start."""

    def make_env(self, spec):
        """Nothing."""
        raise OSError("no container left")


def configured(*levels: dict, **rollout) -> RunConfig:
    curriculum = {"levels": list(levels), "promote_at": 0.5, "window": 4} if levels else {}
    settings = {"environment_options": TINY, "curriculum": curriculum} | rollout
    return parse_config({"rollout": settings, "evaluation_episodes": 8})


def played_at_each_level(config: RunConfig):
    rollout = config.rollout
    task = make_task(rollout.environment, rollout.environment_options)
    return task, training_tasks(config, task)


def lengths(task, iterations: int = 4) -> set[int]:
    return {shortest_path(spec.options["map"]) for i in range(iterations) for spec in task.training_specs(i, 16)}


def test_without_settings_the_task_is_played_as_it_is() -> None:
    task, levels = played_at_each_level(configured())
    assert levels == (task,) and make_curriculum(configured()) is None


def test_a_level_is_the_task_with_other_options() -> None:
    config = configured({"distances": [1, 1]}, {"distances": [2, 2]}, {}, environment_options={"evaluation_maps": 8})
    task, levels = played_at_each_level(config)
    assert [lengths(level) for level in levels[:2]] == [{1}, {2}]
    assert levels[2].training_specs(3, 16) == task.training_specs(3, 16)


def test_what_the_run_evaluates_is_trained_on_at_no_level() -> None:
    """Of the twelve lakes of four cells two are evaluated; other levels set other lakes aside."""
    task, levels = played_at_each_level(configured({"distances": [1, 1], "seed": 1}, {"distances": [1, 2], "seed": 2}))
    evaluated = {spec.prompt_id for spec in task.evaluation_specs(8)}
    trained = {spec.prompt_id for level in levels for i in range(8) for spec in level.training_specs(i, 16)}
    assert len(evaluated) == 2 and len(trained) > 5 and not trained & evaluated


def test_starts_are_staggered_at_every_level_by_the_runs_seed() -> None:
    levels = ({"distances": [1, 1]}, {})
    _, plain = played_at_each_level(configured(*levels, stagger_turns=3))
    assert all({s.options[START_TURN] for s in level.training_specs(0, 40)} == {0, 1, 2, 3} for level in plain)
    _, (only,) = played_at_each_level(configured(stagger_turns=3))
    config = configured(stagger_turns=3)
    _, (other,) = played_at_each_level(config.model_copy(update={"seed": 1}))
    assert only.training_specs(0, 40) != other.training_specs(0, 40)


@pytest.mark.parametrize(
    ("levels", "match"),
    [
        (({}, {"word": "fish"}), r"level 1 .*another vocabulary.*rollout\.curriculum\.levels\[1\]"),
        (({"distance": 1}, {}), r"level 0 .*'distance'.*rollout\.curriculum\.levels\[0\]"),
        (({}, {"distances": [4, 5]}), r"level 1 .*no such lake.*rollout\.curriculum\.levels\[1\]"),
        (({}, {"distances": [2, 2], "hole_probability": 1.0}), r"level 1 .*no such lake.*levels\[1\]"),
    ],
)
def test_a_level_that_does_not_fit_is_refused_by_name(monkeypatch, levels: tuple[dict, ...], match: str) -> None:
    monkeypatch.setattr("megatron_rl.environments.frozen_lake.LAKE_ATTEMPTS", 500)
    with pytest.raises(ConfigError, match=match):
        played_at_each_level(configured(*levels, environment=f"{HERE}:Worded"))


def test_a_level_of_nothing_but_what_is_evaluated_is_refused_by_name() -> None:
    """Of four lakes the task evaluates three, and the level sets three aside: the one it has left is evaluated."""
    narrow = TINY | {"distances": [2, 2], "evaluation_maps": 3}
    left = [FrozenLakeTask(**narrow, seed=seed).training_specs(0, 1)[0].prompt_id for seed in range(9)]
    other = next(seed for seed, prompt in enumerate(left) if prompt != left[0])
    with pytest.raises(ConfigError, match=r"level 1 .*nothing is left.*levels\[1\]"):
        played_at_each_level(configured({}, {"seed": other}, environment_options=narrow))


def test_starts_are_not_staggered_where_no_action_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"list no valid actions.*rollout\.stagger_turns"):
        played_at_each_level(configured(environment=f"{HERE}:Silent", stagger_turns=1))
    assert played_at_each_level(configured(environment=f"{HERE}:Silent"))
    assert played_at_each_level(configured(environment=f"{HERE}:Broken", stagger_turns=1)), "it may start next time"


@pytest.mark.parametrize(
    ("rollout", "match"),
    [
        ({"environment": "prompts", "stagger_turns": 1}, "stagger_turns to 0"),
        ({"curriculum": {"levels": [{}]}}, "one level is no curriculum"),
        ({"curriculum": {"levels": [{}, {}], "promote_at": 1.5}}, "promote_at"),
        ({"curriculum": {"levels": [{}, {}], "window": 0}}, "window"),
        ({"curriculum": {"level": [{}, {}]}}, "'levels'"),
        ({"repetition": {"ngram_times": 1}}, "ngram_times"),
        ({"engine_retries": -1}, "engine_retries"),
    ],
)
def test_contradictions_are_refused_at_load(rollout: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_config({"rollout": rollout})


def test_a_level_of_single_responses_is_refused_for_group_methods() -> None:
    plain = {"algorithm": {"estimator": "grpo", "anchor": "recompute"}}
    options = {"environment_options": {"maps_per_prompt": 4}, "curriculum": {"levels": [{"maps_per_prompt": 1}, {}]}}
    with pytest.raises(ConfigError, match="maps_per_prompt"):
        parse_config({**plain, "rollout": options})


def test_the_example_can_be_played() -> None:
    folder = ROOT / "examples/frozen_lake"
    config = load_config([folder / "ppo.yaml", folder / "curriculum.yaml"])
    _, levels = played_at_each_level(config)
    assert len(levels) == len(config.rollout.curriculum.levels) > 1 and config.rollout.stagger_turns
    assert max(lengths(levels[0])) < max(lengths(levels[-1]))
    assert isinstance(levels[0].make_env(levels[0].training_specs(0, 1)[0]).inner, FrozenLakeText)


def test_a_restarted_process_counts_what_is_recorded_to_where_it_was(tmp_path: Path) -> None:
    """Shards of several sizes; the level rises in the midst of some."""
    config = configured({"distances": [1, 1]}, {"distances": [1, 2]}, {})
    live, again, rng, blocks = make_curriculum(config), make_curriculum(config), random.Random(3), {}
    for shard in range(12):
        records = []
        for _ in range(rng.randrange(1, 9)):
            number = shard * 100 + len(records)
            block = number // 150
            level = blocks.setdefault(block, live.level)
            stamp = {"block": block, "group_size": 1, "level": level, "success": rng.random() < 0.6}
            records.append(trajectory(f"t{number}", **stamp))
            live.count([(stamp, "completed")])
        write_shard(tmp_path / f"{shard // 4:05d}", HEADER, records, name=f"{shard:08d}")
    assert count_recorded(again, tmp_path) == blocks
    assert again.state() == live.state() and live.level == 2 and again.success == live.success


def test_recorded_levels_that_are_gone_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "0", HEADER, [trajectory("a", block=0, level=2)], name="0")
    with pytest.raises(ConfigError, match=r"level 2.*rollout\.curriculum\.levels"):
        count_recorded(make_curriculum(configured({}, {})), tmp_path)


def test_rows_with_unreadable_metadata_are_not_counted(tmp_path: Path) -> None:
    curriculum = make_curriculum(configured({}, {}))
    write_tampered(tmp_path / "0", "metadata", {0: '{"level": 0', 1: "[]"})
    write_shard(tmp_path / "1", HEADER, [trajectory("a", block=7, level=0, success=True)], name="0")
    assert count_recorded(curriculum, tmp_path) == {7: 0} and curriculum.state()["recent"] == [True]
