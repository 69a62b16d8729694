"""What tests of every folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.dist.pool import RankPool

# Before torch is imported anywhere: rank processes inherit these.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A deadline would measure how busy the machine is; the lanes have limits of their own.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes that live for the whole session: `ranks.run(func, world_size, *args)`."""
    # Imported on first use: most unit tests need neither torch.distributed nor rank processes.
    from tests.dist.pool import RankPool

    with RankPool() as pool:
        yield pool
