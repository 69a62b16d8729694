"""The level of a curriculum is part of a run: one that is broken anywhere goes on as the unbroken one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.pool import RankPool
from tests.dist.test_stopping import _same, _timeless
from tests.dist.test_training import _config, _Watch, tiny  # noqa: F401  (a fixture)

WINDOW = 12
"""More than the 8 episodes of one iteration and fewer than those of two: the level rises after every second."""
ROLLOUT = {
    "environment": "tests.dist.graded:GradedLake",
    "environment_options": {"evaluation_maps": 4, "maps_per_prompt": 4},
    "stagger_turns": 2,
    "curriculum": {
        "levels": [{"distances": [1, 1]}, {"distances": [2, 2]}, {}], "promote_at": 0.01, "window": WINDOW,
    },
}  # fmt: skip
GRPO = {
    "algorithm": {"estimator": "grpo", "anchor": "recompute", "importance": "none"},
    "rollout": ROLLOUT,
}


def run(config, stop_at: int | None = None) -> tuple[list[dict[str, float]], dict]:
    """Metrics of the iterations completed, and the source's state; asked to stop at its `stop_at`th question."""
    from megatron_rl.backend import topology
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.stopping import Stopped, StopRequest
    from megatron_rl.training.trainer import Trainer

    class AtQuestion(StopRequest):
        questions = 0

        def agreed(self) -> bool:
            self.questions += 1
            if self.questions == stop_at:
                self.request()
            return super().agreed()

    watch, rollout = _Watch(), config.rollout
    task = make_task(rollout.environment, rollout.environment_options)
    trainer = Trainer(config, topology.initialize(config.parallel, seed=config.seed), task, watch, AtQuestion())
    try:
        trainer.run()
    except Stopped:
        assert stop_at is not None
    return watch.rows, trainer.source.state()


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tiny: Path, tmp_path_factory: pytest.TempPathFactory):  # noqa: F811
    output = tmp_path_factory.mktemp("unbroken")
    answers = ranks.run(run, 2, _config(tiny, output, **GRPO))
    assert answers[0][1] == answers[1][1], "ranks stand at the same level"
    return answers[0]


def test_the_level_rises_with_the_results_of_all_ranks(unbroken) -> None:
    rows, state = unbroken
    assert [row["curriculum/level"] for row in rows] == [0, 0, 1]
    assert all(0 < row["curriculum/success"] < 1 for row in rows)
    assert state["curriculum"]["level"] == 1 and len(state["curriculum"]["recent"]) == 8


@pytest.mark.parametrize(
    "stop_at",
    [pytest.param(1, id="while playing", marks=pytest.mark.full), pytest.param(2, id="before the first step")],
)
def test_a_run_stopped_in_an_iteration_keeps_its_level(
    ranks: RankPool, tiny: Path, tmp_path: Path, unbroken, stop_at: int  # noqa: F811
) -> None:  # fmt: skip
    """In iteration 1, whose results raise the level: not yet counted, and counted."""
    config = _config(tiny, tmp_path, **GRPO)
    first, _ = ranks.run(run, 2, config, 3 + stop_at)[0]
    assert len(first) == 1
    rest, state = ranks.run(run, 2, config)[0]
    assert state == unbroken[1]
    for found, row in zip(rest, unbroken[0][1:], strict=True):
        assert _same(_timeless(found), _timeless(row)), (found, row)


def test_what_a_crash_lost_is_counted_again(
    ranks: RankPool, tiny: Path, tmp_path: Path, unbroken  # noqa: F811
) -> None:  # fmt: skip
    """Iteration 1 is trained on what lies recorded, and raises the level as it did."""
    ranks.run(run, 2, _config(tiny, tmp_path, **GRPO, checkpoint={"every": 1}, iterations=2))
    for file in (tmp_path / "checkpoints/iteration_00000002").iterdir():
        if file.is_file():
            file.unlink()
    rest, state = ranks.run(run, 2, _config(tiny, tmp_path, **GRPO))[0]
    assert state == unbroken[1]
    assert all(_same(_timeless(a), _timeless(b)) for a, b in zip(rest, unbroken[0][1:], strict=True))


@pytest.mark.full
def test_the_window_does_not_depend_on_the_ranks(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    """The last 5 of 8 episodes are the same ones, in the same order, however many ranks played them."""
    narrow = {**ROLLOUT, "curriculum": {**ROLLOUT["curriculum"], "promote_at": 1.0, "window": 5}}
    states = []
    for world in (1, 2):
        config = _config(tiny, tmp_path / str(world), algorithm=GRPO["algorithm"], rollout=narrow, iterations=1)
        states.append(ranks.run(run, world, config)[0][1]["curriculum"])
    assert states[0] == states[1] and len(set(states[0]["recent"])) == 2
