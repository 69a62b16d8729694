from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.hf.checkpoints import VARIANTS, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of one variant's checkpoint, made on first use; never to be changed."""
    made: dict[str, Path] = {}

    def get(variant: str = "plain") -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(tmp_path_factory.mktemp("hf") / variant, **VARIANTS[variant])
        return made[variant]

    return get


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the plain checkpoint, to be changed."""
    return shutil.copytree(checkpoint("plain"), tmp_path / "copy")
