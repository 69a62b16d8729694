"""One table at the end of the run: how far each family is from transformers under each layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROWS = pytest.StashKey[list[tuple[str, ...]]]()
HEADER = ("family", "layout", "round trip", "logits", "gradients", "lane")


@pytest.fixture
def keep_row(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Enters a case in the table."""

    def keep(family: str, layout: str, round_trip: str, logits: float, gradients: float, lane: str) -> None:
        row = (family, layout, round_trip, f"{logits:.1e}", f"{gradients:.1e}", lane)
        pytestconfig.stash.setdefault(ROWS, []).append(row)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Family × layout → round trip, largest difference of log-probs and entropies (nats), and of gradients."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("HF families against transformers, float32")
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, *rows):
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
