"""Manifests of published directories, and the canary that lies beside the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatron_rl.engines.canary import CANARY_FILE, Canary, check_canary, mean_k3
from megatron_rl.engines.publication import PUBLICATION_FILE, check_publication, write_publication
from megatron_rl.errors import CheckpointError, EngineVersionError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two weight files and a configuration, published as version 3."""
    (tmp_path / "a.safetensors").write_bytes(bytes(range(200)))
    (tmp_path / "b.safetensors").write_bytes(b"b" * 100)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not listed")
    write_publication(tmp_path, 3)
    return tmp_path


def test_untouched_directory_passes(directory: Path) -> None:
    assert check_publication(directory, 3)
    (directory / "notes.txt").write_text("something else")
    (directory / CANARY_FILE).write_text("written later")
    assert check_publication(directory, 3)
    (directory / PUBLICATION_FILE).unlink()
    assert not check_publication(directory, 3)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)


def edit_pieces(folder: Path, edit: Callable[[list], object]) -> None:
    manifest = json.loads((folder / PUBLICATION_FILE).read_text())
    edit(manifest["files"]["a.safetensors"]["pieces"])
    (folder / PUBLICATION_FILE).write_text(json.dumps(manifest))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda folder: flip(folder / "a.safetensors"),
    "truncated": lambda folder: (folder / "a.safetensors").write_bytes(bytes(range(199))),
    "missing": lambda folder: (folder / "b.safetensors").unlink(),
    "left over": lambda folder: (folder / "c.safetensors").write_bytes(b""),
    "config": lambda folder: (folder / "config.json").write_text("[]"),
    "short manifest": lambda folder: edit_pieces(folder, lambda pieces: pieces.pop()),
    "manifest": lambda folder: (folder / PUBLICATION_FILE).write_text('{"version": 3'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(directory: Path, damage: str) -> None:
    DAMAGE[damage](directory)
    with pytest.raises(CheckpointError):
        check_publication(directory, 3)


@pytest.mark.parametrize("sizes", [[200], [1, 0, 120, 79], [2] * 100])
def test_pieces_of_the_writer_are_as_good(directory: Path, sizes: list[int]) -> None:
    """Hashed when they were written, in pieces of any size; every byte is in one."""
    content, pieces, start = (directory / "a.safetensors").read_bytes(), [], 0
    for size in sizes:
        pieces.append((size, xxhash.xxh3_64_hexdigest(content[start : start + size])))
        start += size
    write_publication(directory, 3, {"a.safetensors": pieces})
    assert check_publication(directory, 3)
    for place in range(0, len(content), 9):
        altered = bytearray(content)
        altered[place] ^= 1
        (directory / "a.safetensors").write_bytes(altered)
        with pytest.raises(CheckpointError, match="altered"):
            check_publication(directory, 3)


def test_another_version_is_refused(directory: Path) -> None:
    with pytest.raises(EngineVersionError, match="found 3, expected 4"):
        check_publication(directory, 4)


class Engine:
    """Scores everything with given log-probs."""

    def __init__(self, logprobs: list[float]) -> None:
        self._logprobs = np.asarray(logprobs, np.float32)

    def score(self, tokens) -> np.ndarray:
        return self._logprobs[: len(tokens)]


def test_canary_goes_through_its_file(tmp_path: Path) -> None:
    canary = Canary(np.array([3, 1, 2], np.int32), np.array([0, -0.1, -2.7182817], np.float32))
    assert Canary.read(tmp_path) is None
    canary.write(tmp_path)
    found = Canary.read(tmp_path)
    np.testing.assert_array_equal(found.tokens, canary.tokens)
    np.testing.assert_array_equal(found.logprobs, canary.logprobs)
    assert [file.name for file in tmp_path.iterdir()] == [CANARY_FILE]


@pytest.mark.parametrize("text", ["{", "{}", '{"tokens": [1, 2], "logprobs": [0]}', '{"tokens": [1], "logprobs": [0]}'])
def test_damaged_canary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CANARY_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="damaged canary"):
        Canary.read(tmp_path)


def test_mean_k3_is_its_definition() -> None:
    trainer, engine = [0.0, -1.0, -2.5, -0.3], [0.0, -1.2, -2.0, -0.3]
    ratios = [math.exp(a - b) for a, b in zip(trainer[1:], engine[1:], strict=True)]
    assert mean_k3(trainer, engine) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)


def test_canary_judges() -> None:
    canary = Canary(np.array([1, 2, 3], np.int32), np.array([0, -1, -2], np.float32))
    assert check_canary(Engine([0, -1, -2]), canary) == 0
    for wrong in ([0, -1, -3.0], [0, math.nan, -2], [0, -1, -math.inf], [0, -4000, -2]):
        with pytest.raises(EngineVersionError, match="mean k3"):
            check_canary(Engine(wrong), canary)
    assert json.loads(json.dumps({"k3": check_canary(Engine([0, -1, -2.05]), canary)}))["k3"] < 0.01
