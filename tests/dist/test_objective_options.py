"""Options of objectives in real runs: what is frozen stays, what is removed trains nothing, what is steered resumes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.errors import LearningError
from tests.dist.pool import RankPool
from tests.dist.test_recipes import base, configured, make_loop  # noqa: F401

UNGRADED = "rollout.environment=frozen_lake"
"""A lake on which an untrained policy earns nothing: all rewards are equal."""


def frozen(config) -> tuple[dict[str, float], dict[str, float]]:
    """How far every tensor of the critic moved, and the norm of its last gradient as it entered the optimizer."""
    from tests.dist.experiment import capture, whole

    trainer, _ = make_loop(config)
    critic, gradients = trainer.models.critic, {}
    before = whole(critic.model)
    with capture(critic, gradients, "critic"):
        trainer.run()
    after = whole(critic.model)
    moved = {name: float((after[name] - weight).abs().max()) for name, weight in before.items()}
    return moved, {name: float(gradient.norm()) for name, gradient in gradients["critic"].items()}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_frozen_attention_does_not_move_and_all_else_does(ranks: RankPool, base: Path, tmp_path: Path, dtype) -> None:  # noqa: F811
    """Not by its gradient, not by weight decay; bfloat16 hides steps below its spacing, float32 does not."""
    changes = ["critic_optimizer.weight_decay=0.1", f"model.dtype={dtype}", "critic_optimizer.lr=0.01"]
    moved, norms = ranks.run(frozen, 2, configured(base, "sao", tmp_path / dtype, *changes))[0]
    held = {name for name in moved if ".self_attn." in name}
    assert len(held) == 2 * 6 and {moved[name] for name in held} == {norms[name] for name in held} == {0.0}
    still = {name for name in set(moved) - held if moved[name] == 0.0}
    assert still == set() and any("input_layernorm" in name for name in moved)


def one_iteration(config) -> tuple[dict[str, float], bool]:
    """Metrics of the first iteration, and whether actor, moments, step count and EWMA are as they were."""
    import torch

    from megatron_rl.backend.anchor import main_weights

    trainer, _ = make_loop(config)
    actor, anchor = trainer.models.actor, trainer.models.anchor

    def state() -> list:
        moments = [t for part in actor.parts for s in part.optimizer.state.values() for t in s.values()]
        return [t.clone() for t in (*main_weights(actor), *moments, *(anchor.average if anchor else ()))]

    before, steps = state(), actor.steps
    metrics = trainer.iterate(0)
    same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=False)) and actor.steps == steps
    return metrics, same and (anchor is None or anchor.z == 1.0)


NOTHING_LEFT = {
    "all rejected, EWMA": ("ppo_ewma", ["algorithm.rejection={unit: token, max: -1}"]),
    "all rejected, recompute": ("gspo", ["algorithm.rejection={unit: sequence_mean, max: -1}"]),
    "all truncated": ("grpo", ["algorithm.overlong_filter=true"]),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_step_with_everything_removed_changes_nothing(ranks: RankPool, base: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    recipe, changes = NOTHING_LEFT[name]
    metrics, same = ranks.run(one_iteration, 2, configured(base, recipe, tmp_path / "run", *changes))[0]
    assert same and metrics["actor/skipped"] == 1 and "actor/stepped" not in metrics
    if recipe == "ppo_ewma":
        assert metrics["removed/share"] == 1 and metrics["critic/stepped"] == 1


def outcome_of(config) -> str:
    """The error that a whole run ends with."""
    trainer, _ = make_loop(config)
    try:
        trainer.run()
    except LearningError as error:
        return str(error)
    return "it ended well"


USELESS = {
    "all rejected": (["algorithm.rejection={unit: token, max: -1}", "algorithm.max_skipped_steps=3"],
                     "3 optimizer steps"),
    "all rejected, few steps": (["algorithm.rejection={unit: token, max: -1}"], "no decision was left"),
    "environments that fail": (["rollout.environment=tests.dist.graded:FailingLake"], "no answer is known"),
    "some environments fail": (["rollout.environment=tests.dist.graded:FailingLake", "rollout.max_failed=1"],
                               "it ended well"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if "some" in n or "few" in n else ()) for n in USELESS]
)
def test_a_run_that_learns_nothing_does_not_end_well(ranks: RankPool, base: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    changes, says = USELESS[name]
    found = ranks.run(outcome_of, 2, configured(base, "ppo", tmp_path / "run", *changes))
    assert all(says in text for text in found) and len(set(found)) == 1
    assert (tmp_path / "run" / "export").exists() == (says == "it ended well")


def test_uniform_groups_are_refilled_until_rounds_are_spent(ranks: RankPool, base: Path, tmp_path: Path) -> None:  # noqa: F811
    config = configured(base, "dapo", tmp_path / "run", UNGRADED)
    metrics, same = ranks.run(one_iteration, 2, config)[0]
    assert same and metrics["sampling/rounds"] == 3 and metrics["sampling/played"] == 24
    assert metrics["sampling/uniform_groups"] == 6 and metrics["rollout/trajectories"] == 0
    shards = list((tmp_path / "run/rollouts/iteration-000000").glob("*.arrow"))
    assert len(shards) == 6, "each rank writes one shard a round"


def run_rows(config) -> list[dict[str, float]]:
    """Metrics of every iteration without the clock's."""
    trainer, watch = make_loop(config)
    trainer.run()
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "throughput/"))} for row in watch.rows]


def test_pretraining_and_steered_kl_resume_exactly(ranks: RankPool, base: Path, tmp_path: Path) -> None:  # noqa: F811
    """Explained variance cannot rise by 9: pretraining ends after one patience, also across a stop."""
    changes = ["algorithm.value.warmup={iterations: 3, patience: 1, gain: 9}", "iterations=4", "checkpoint.every=1"]
    changes += ["algorithm.reference_kl={name: loss, coef: 0.1, target: 0.5}"]
    whole = ranks.run(run_rows, 2, configured(base, "vc_ppo", tmp_path / "whole", *changes))[0]
    assert ["actor/stepped" in row for row in whole] == [False, False, True, True]
    assert whole[2]["policy/kl_coef"] == pytest.approx(0.1 * 0.98**2)  # KL far below its target: 2 % less each time
    ranks.run(run_rows, 2, configured(base, "vc_ppo", tmp_path / "broken", *changes, "iterations=2"))
    rest = ranks.run(run_rows, 2, configured(base, "vc_ppo", tmp_path / "broken", *changes))[0]
    assert [row["iteration"] for row in rest] == [2, 3]
    for ours, theirs in zip(rest, whole[2:], strict=True):
        different = {k for k in theirs if not np.array_equal(ours.get(k, math.inf), theirs[k], equal_nan=True)}
        assert different == set()


def test_prompt_information_is_bounded(ranks: RankPool, base: Path, tmp_path: Path) -> None:  # noqa: F811
    config = configured(base, "ppo", tmp_path / "run", "algorithm.information_prompts=2")
    metrics, _ = ranks.run(one_iteration, 2, config)[0]
    assert -1 < metrics["prompts/mutual_information"] <= math.log(2) and 0 <= metrics["prompts/retrieval"] <= 1
