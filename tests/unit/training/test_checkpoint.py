"""Directories of checkpoints without models: what counts as whole, which one is newest, which are removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_rl.errors import CheckpointError
from megatron_rl.files import temporary_name
from megatron_rl.training import checkpoint
from megatron_rl.training.checkpoint import MANIFEST, faults, newest_complete

FILES = {"run.json": b"{}", "states/a": b"abc" * 50, "states/b": b"", "random/00000.json": b"[1]"}


def write(root: Path, iteration: int, *, hidden: bool = False, manifest: bool = True) -> Path:
    """A directory as a save leaves it."""
    name = f"iteration_{iteration:08d}"
    path = root / (f".{name}.partial" if hidden else name)
    for file, data in FILES.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(data)
    if manifest:
        (path / MANIFEST).write_text(json.dumps(checkpoint._manifest(path)))
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process needs nobody's agreement."""
    monkeypatch.setattr(checkpoint, "together", lambda _file, work: work())


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


DAMAGE = {
    "shorter": ("states/a", shorten, "states/a has 149 bytes, the manifest says 150"),
    "changed": ("states/a", change, "states/a has checksum"),
    "gone": ("states/b", Path.unlink, "states/b is missing"),
    "empty file filled": ("states/b", lambda path: path.write_bytes(b"x"), "states/b has 1 bytes, the manifest says 0"),
    "no manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "torn manifest": (MANIFEST, shorten, "unreadable: JSONDecodeError"),
    "foreign manifest": (MANIFEST, lambda path: path.write_text("[]"), "unreadable: TypeError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, kind: str, caplog) -> None:
    file, damage, expected = DAMAGE[kind]
    whole, damaged = write(tmp_path, 5), write(tmp_path, 12)
    assert newest_complete(tmp_path).path == damaged
    damage(damaged / file)
    found = newest_complete(tmp_path)
    assert found.path == whole
    ((path, reason),) = found.skipped
    assert path == damaged and reason.startswith(expected)
    assert str(damaged) in caplog.text and reason in caplog.text


def test_sizes_alone_do_not_see_a_changed_byte(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    change(path / "states" / "a")
    assert faults(path, checksums=False) is None
    assert faults(path) is not None


def test_shares_cover_every_file_once(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    for file in FILES:
        data = (path / file).read_bytes()
        (path / file).write_bytes(data + b"x")
        assert sum(faults(path, share, 3) is not None for share in range(3)) == 1
        (path / file).write_bytes(data)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for root in (tmp_path, tmp_path / "absent"):
        assert newest_complete(root) == checkpoint.Found(None, ())


def test_newest_is_by_number_not_by_name_or_time(tmp_path: Path) -> None:
    newest = write(tmp_path, 123_456_789)
    write(tmp_path, 99_999_999)
    assert newest_complete(tmp_path).path == newest


def test_the_next_save_finishes_what_only_lacks_its_name_and_removes_the_rest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, hidden=True)
    write(tmp_path, 3, hidden=True, manifest=False)
    found = newest_complete(tmp_path)
    assert found.path.name == ".iteration_00000002.partial" and len(found.skipped) == 1
    checkpoint._start(tmp_path / ".iteration_00000004.partial")
    assert names(tmp_path) == [".iteration_00000004.partial", "iteration_00000001", "iteration_00000002"]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    old, new = write(tmp_path, 2), write(tmp_path, 2, hidden=True)
    (old / "left over").touch()
    checkpoint._publish(new, old)
    assert names(tmp_path) == [old.name] and faults(old) is None and not (old / "left over").exists()


@pytest.mark.parametrize("step", [1, 2])
def test_killed_while_it_replaces_an_iteration_the_newer_one_is_found_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    old = write(tmp_path, 2)
    (old / "older").touch()
    new = write(tmp_path, 2, hidden=True).rename(temporary_name(old))
    calls = []

    def dying(*paths: Path, real=os.rename) -> None:
        calls.append(paths)
        if len(calls) == step:
            raise KeyboardInterrupt
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            checkpoint._publish(new, old)
    assert newest_complete(tmp_path).path == new and old.exists() == (step == 1)
    checkpoint._start(temporary_name(tmp_path / "iteration_00000003"))
    assert newest_complete(tmp_path).path == old and faults(old) is None and not (old / "older").exists()
    assert [name for name in names(tmp_path) if "_00000002" in name] == [old.name]


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(1, 0, [5]), (2, 0, [4, 5]), (3, 0, [1, 2, 4, 5]), (9, 0, [1, 2, 4, 5]), (1, 2, [4, 5]), (1, 1, [1, 4, 5])],
)
def test_pruning_counts_whole_ones_and_spares_later_ones(
    tmp_path: Path, keep: int, every: int, left: list[int]
) -> None:
    """2 is damaged: it is not counted among those kept, and goes with what is older than them, every 2nd or not."""
    for iteration in (1, 2, 4, 5, 8):
        write(tmp_path, iteration)
    shorten(tmp_path / "iteration_00000002" / "states" / "a")
    checkpoint._prune(tmp_path, 5, keep, every)
    assert [int(name[-8:]) for name in names(tmp_path)] == [*left, 8]


def test_a_removal_that_dies_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 1)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda _: None)
    checkpoint._remove(path)
    assert newest_complete(tmp_path).path is None


@pytest.mark.parametrize("cursor", [{"a": (1, 2)}, {1: 2}, {"a": {1, 2}}, {"a": float("nan")}])
def test_a_cursor_that_json_would_change_is_refused(cursor: dict) -> None:
    with pytest.raises(CheckpointError, match="cursor"):
        checkpoint._check_cursor(cursor)
    checkpoint._check_cursor({"a": [1, 2], "b": None, "c": 0.1})
