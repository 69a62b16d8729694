"""Directories that appear whole: whatever kills a writer, the old or the new one stands after the next try."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl import files
from megatron_rl.files import name_directory, replace_directory, sweep, temporary_name
from megatron_rl.processes import has_ended, place, start_time

STEPS = ("os.rename", "os.rename", "os.fsync", "shutil.rmtree")
"""What `replace_directory` calls, in this order, where something has the name."""


def fill(directory: Path, content: str) -> Path:
    """A directory of two files, which are equal where it is whole."""
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).write_text(content)
    return directory


def content(directory: Path) -> str:
    (found,) = {(directory / name).read_text() for name in ("a", "b")}
    return found


def publish(target: Path, content: str, *, alone: bool) -> None:
    sweep(target.parent, re.escape(target.name), alone=alone)
    replace_directory(fill(temporary_name(target), content), target)


def dies(work: Callable[[], None], step: int) -> None:
    """Do it in a process that is gone before its `step`th call of `STEPS`, without any clean-up."""
    child = os.fork()
    if not child:
        calls = 0

        def counted(real: Callable) -> Callable:
            def call(*args, **options):
                nonlocal calls
                calls += 1
                if calls > step:
                    os._exit(7)
                return real(*args, **options)

            return call

        os.rename, os.fsync, shutil.rmtree = counted(os.rename), counted(os.fsync), counted(shutil.rmtree)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if step < len(STEPS) else 0)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("step", range(len(STEPS) + 1))
def test_killed_before_any_step_the_next_try_succeeds(tmp_path: Path, step: int, alone: bool) -> None:
    target = tmp_path / "x"
    publish(target, "old", alone=alone)
    dies(lambda: publish(target, "new", alone=alone), step)
    sweep(tmp_path, "x", alone=alone)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert content(target) == ("new" if step > 1 else "old")
    publish(target, "newer", alone=alone)
    assert content(target) == "newer" and [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("step", range(3))
def test_killed_twice_in_the_same_place(tmp_path: Path, step: int) -> None:
    target = tmp_path / "x"
    publish(target, "old", alone=False)
    for attempt in "12":
        dies(lambda attempt=attempt: publish(target, attempt, alone=False), step)
    publish(target, "last", alone=False)
    assert content(target) == "last" and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_refused_rename_gives_the_old_one_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = tmp_path / "x", []
    publish(target, "old", alone=False)
    real = os.rename

    def refuse_second(*args) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*args)

    new = fill(temporary_name(target), "new")
    monkeypatch.setattr(files.os, "rename", refuse_second)
    with pytest.raises(OSError, match="No space"):
        replace_directory(new, target)
    assert content(target) == "old" and content(new) == "new"


@pytest.mark.parametrize(
    "left", ["staged", "staged.replaced", "partial", "0123abcd.partial", "0123abcd.partial.replaced", "replaced"]
)
def test_fixed_names_are_in_nobodys_way(tmp_path: Path, left: str) -> None:
    """A folder that only its owner writes loses whatever hidden name of the kind it has."""
    fill(tmp_path / f".x.{left}", "?")
    fill(tmp_path / f"..x.staged.{left}", "?")
    publish(tmp_path / "x", "first", alone=False)
    publish(tmp_path / "x", "second", alone=True)
    assert content(tmp_path / "x") == "second" and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_living_and_what_is_not_ours_stay(tmp_path: Path) -> None:
    target = tmp_path / "x[1]"
    ours = fill(temporary_name(target), "being written")
    replaced = fill(temporary_name(target, "replaced"), "the old one")
    elsewhere = fill(tmp_path / f".x[1].{'0' * 16}-1-1-01234567.partial", "by another host")
    other = fill(temporary_name(tmp_path / "x[1].v2"), "of another name")
    notes, visible = fill(tmp_path / ".x[1].notes", "?"), fill(tmp_path / "x[1].partial", "?")
    file, link = tmp_path / ".x[1].old.partial", tmp_path / ".x[1].link.partial"
    file.touch()
    link.symlink_to(visible)
    everything = {ours, replaced, elsewhere, other, notes, visible, file, link}
    sweep(tmp_path, re.escape(target.name))
    assert set(tmp_path.iterdir()) == everything
    sweep(tmp_path / "absent", "x")
    shutil.rmtree(other)
    sweep(tmp_path, re.escape(target.name), alone=True)
    assert set(tmp_path.iterdir()) == {target, notes, visible, file, link} and content(target) == "the old one"


def test_a_name_that_is_taken_is_not_taken_away(tmp_path: Path) -> None:
    target = fill(tmp_path / "x", "theirs")
    with pytest.raises(OSError, match="not empty"):
        name_directory(fill(temporary_name(target), "ours"), target)
    assert content(target) == "theirs"
    (tmp_path / "empty").mkdir()
    name_directory(fill(tmp_path / "full", "ours"), tmp_path / "empty")
    assert content(tmp_path / "empty") == "ours"


def test_a_process_is_judged_only_where_its_number_means_the_same() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here, started = place(), start_time(child.pid)
    assert has_ended(here, child.pid, started) is False
    assert has_ended(here, child.pid, str(int(started) + 1)) is True
    assert has_ended("elsewhere", child.pid, started) is None and has_ended("", child.pid, started) is None
    assert has_ended(here, 2**70, "1") is True
    child.stdin.close()
    # Not waited for yet: such a process has ended although its number is still taken.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(here, child.pid, started) is True
    child.wait()
    assert has_ended(here, child.pid, started) is True
