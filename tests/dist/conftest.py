"""The experiment's data and baseline, made once, and the table of worst errors at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.dist.experiment import Result
    from tests.dist.pool import RankPool
    from tests.dist.scenario import Scenario

WEIGHT_SEED, RECORDING_SEED = 7, 3
"""Chosen so that no ratio, value, sequence weight or router margin lies near an edge: `test_experiment_*` check it."""
ERRORS = pytest.StashKey[dict[str, dict[str, float]]]()


@pytest.fixture(scope="session")
def make_scenario(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Scenario]:
    """A scenario of a model shape: its anchor's log-probs and native routes are recorded on one rank."""
    from tests.dist import experiment
    from tests.dist.layouts import BASELINE
    from tests.dist.scenario import SHAPE, Scenario, recorded_batch, with_recording, write_checkpoints

    def make(shape: Any = SHAPE, **settings: Any) -> Scenario:
        folder: Path = tmp_path_factory.mktemp("scenario")
        checkpoints = write_checkpoints(folder, 10 * WEIGHT_SEED, shape, **settings)
        blank = Scenario(checkpoints, recorded_batch(WEIGHT_SEED, shape))
        ((logprobs, routes),) = ranks.run(experiment.record, 1, blank, BASELINE)
        return replace(blank, batch=with_recording(blank.batch, logprobs, routes, RECORDING_SEED))

    return make


@pytest.fixture(scope="session")
def scenario(make_scenario: Callable[..., Scenario]) -> Scenario:
    """The experiment of the invariance matrix."""
    return make_scenario()


@pytest.fixture(scope="session")
def baseline(ranks: RankPool, scenario: Scenario) -> Result:
    """The experiment on one rank, in one micro-batch, in float32."""
    from tests.dist import experiment
    from tests.dist.layouts import BASELINE

    return ranks.run(experiment.two_steps, 1, scenario, BASELINE)[0]


@pytest.fixture
def keep_errors(pytestconfig: pytest.Config) -> Callable[[str, dict[str, float]], None]:
    """Enters a layout's worst errors in the table."""

    def keep(name: str, worst: dict[str, float]) -> None:
        pytestconfig.stash.setdefault(ERRORS, {})[name] = worst

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Layout × quantity → worst error."""
    rows = config.stash.get(ERRORS, {})
    if not rows:
        return
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(len(name) for name in rows)
    terminalreporter.section("worst error against one rank and one micro-batch")
    terminalreporter.write_line(" " * width + "".join(f"{column:>10}" for column in columns))
    for name, row in rows.items():
        cells = "".join(f"{row[column]:10.1e}" if column in row else f"{'-':>10}" for column in columns)
        terminalreporter.write_line(f"{name:{width}}{cells}")
