"""Publication of weights without models: no leftover keeps a version from being published again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.training import weights
from megatron_rl.training.weights import publish_weights

MODELS = SimpleNamespace(
    version=2, actor=SimpleNamespace(model=None), config=SimpleNamespace(model=SimpleNamespace(path=""))
)
LEFT = [
    ".version-000002.staged",
    ".version-000002.staged.replaced",
    "..version-000002.staged.0123abcd.partial",
    "..version-000002.staged.0123abcd.partial.replaced",
    ".version-000001.staged.replaced",
    f".version-000002.{'0' * 16}-1-1-01234567.partial",
]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(weights.dist, "barrier", lambda: None)

    def write(_model: object, target: Path, _source: str) -> dict:
        target.mkdir(parents=True)
        (target / "model.safetensors").write_text("new")
        return {}

    monkeypatch.setattr(weights, "write_hashed_hf", write)


def is_whole(directory: Path) -> bool:
    return {path.name for path in directory.iterdir()} == {"model.safetensors", "publication.json"}


@pytest.mark.parametrize("left", LEFT)
def test_a_leftover_of_any_step_is_removed(tmp_path: Path, left: str) -> None:
    (tmp_path / left / "x").mkdir(parents=True)
    (tmp_path / "version-000002").mkdir()
    (tmp_path / "version-000002" / "model.safetensors").write_text("old")
    assert is_whole(publish_weights(MODELS, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_publication_killed_between_its_renames_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    publish_weights(MODELS, tmp_path)
    calls = []

    def dying(*paths: Path, real=os.rename) -> None:
        calls.append(paths)
        if len(calls) == step:
            raise KeyboardInterrupt
        real(*paths)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", dying)
            with pytest.raises(KeyboardInterrupt):
                publish_weights(MODELS, tmp_path)
        calls.clear()
    assert is_whole(publish_weights(MODELS, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["version-000002"]
