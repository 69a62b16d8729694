"""Tests of this folder need a CUDA device: where there is none they are skipped, and the reason says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks this folder's tests (the hook sees every folder's) and skips them without a device."""
    missing = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first CUDA device, with nothing allocated before and no cached memory left after."""
    torch.cuda.empty_cache()
    yield torch.device("cuda", 0)
    torch.cuda.empty_cache()
