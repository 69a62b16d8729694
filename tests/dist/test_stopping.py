"""A run that is asked to stop, anywhere, saves and goes on at the next optimizer step as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.dist.pool import RankPool
from tests.dist.test_training import LAKE, _config, _Watch, assert_moved, tiny  # noqa: F401  (a fixture)

BOUNDARIES = {
    "while playing": 1,
    "before the critic's first step": 2,
    "between critic steps": 3,
    "among actor steps": 5,
}
"""Where the request is agreed upon → which agreement it is: one after the rollouts, one before each of the 2 critic and
2 actor steps of an iteration."""


def run(config, stop_at: int | None = None) -> tuple[list[dict[str, float]], bool]:
    """Metrics of the iterations completed, and whether the run stopped at its `stop_at`th question."""
    from megatron_rl.backend import topology
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.stopping import Stopped, StopRequest
    from megatron_rl.training.trainer import Trainer

    class AtQuestion(StopRequest):
        """Asked to stop at one moment, by one rank only: the others must follow."""

        questions = 0

        def agreed(self) -> bool:
            self.questions += 1
            if self.questions == stop_at and place.rank == place.world - 1:
                self.request()
            return super().agreed()

    watch = _Watch()
    place = topology.initialize(config.parallel, seed=config.seed)
    trainer = Trainer(config, place, make_task("frozen_lake", LAKE), watch, AtQuestion())
    try:
        trainer.run()
    except Stopped:
        return watch.rows, True
    return watch.rows, False


def _timeless(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith(("seconds/", "throughput/"))}


def _same(found: dict[str, float], expected: dict[str, float]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[k], expected[k], equal_nan=True) for k in found)


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tiny: Path, tmp_path_factory: pytest.TempPathFactory):  # noqa: F811
    output = tmp_path_factory.mktemp("unbroken")
    rows, stopped = ranks.run(run, 2, _config(tiny, output, parallel={"pipeline": 2}))[0]
    assert not stopped
    assert_moved(tiny, output)
    return output, rows


@pytest.mark.parametrize(
    "where",
    [pytest.param(name, marks=pytest.mark.full) if "first" in name else name for name in BOUNDARIES],
)
def test_a_stopped_run_goes_on_at_the_next_step(
    ranks: RankPool, tiny: Path, tmp_path: Path, unbroken, where: str  # noqa: F811
) -> None:  # fmt: skip
    """In iteration 1, with pipeline stages of other layers and router statistics."""
    whole, expected = unbroken
    config = _config(tiny, tmp_path, parallel={"pipeline": 2})
    answers = ranks.run(run, 2, config, 5 + BOUNDARIES[where])
    assert [stopped for _, stopped in answers] == [True, True]
    assert [row["iteration"] for row in answers[0][0]] == [0]
    rest, stopped = ranks.run(run, 2, config)[0]
    assert not stopped and [row["iteration"] for row in rest] == [1, 2]
    for found, row in zip(rest, expected[1:], strict=True):
        assert _same(_timeless(found), _timeless(row)), (found, row)
    name = "export/model.safetensors"
    assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert (tmp_path / "consumed.jsonl").read_text() == (whole / "consumed.jsonl").read_text()


def test_a_run_stopped_in_an_iteration_goes_on_in_another_layout(
    ranks: RankPool, tiny: Path, tmp_path: Path, unbroken  # noqa: F811
) -> None:  # fmt: skip
    """Load-balancing statistics of the critic, known to its own stage only, reach the stages of the new layout."""
    whole, expected = unbroken
    ranks.run(run, 2, _config(tiny, tmp_path, parallel={"pipeline": 2}), 5 + BOUNDARIES["between critic steps"])
    rest, _ = ranks.run(run, 2, _config(tiny, tmp_path, parallel={"expert": 2}))[0]
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/loss", "rollout/reward_mean"):
        assert rest[0][name] == pytest.approx(expected[1][name], rel=1e-4), name
    consumed = (tmp_path / "consumed.jsonl").read_text().splitlines()
    assert consumed[:2] == (whole / "consumed.jsonl").read_text().splitlines()[:2]


def test_what_a_crash_lost_is_trained_on_the_same_rollouts(
    ranks: RankPool, tiny: Path, tmp_path: Path, unbroken  # noqa: F811
) -> None:  # fmt: skip
    """The crash comes after two iterations and the newest checkpoint is lost: iteration 1 reads its files again."""
    whole, expected = unbroken
    config = _config(tiny, tmp_path, parallel={"pipeline": 2}, checkpoint={"every": 1}, iterations=2)
    ranks.run(run, 2, config)
    for file in (tmp_path / "checkpoints/iteration_00000002").iterdir():
        if file.is_file():
            file.unlink()
    shard = tmp_path / "rollouts/iteration-000001/rank-00000.arrow"
    written = shard.stat().st_mtime_ns
    rest, _ = ranks.run(run, 2, _config(tiny, tmp_path, parallel={"pipeline": 2}))[0]
    assert shard.stat().st_mtime_ns == written
    assert all(_same(_timeless(a), _timeless(b)) for a, b in zip(rest, expected[1:], strict=True))
