"""What operators see: every fault of a directory, and a trajectory as turns."""

from __future__ import annotations

import io
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.observe.rollout_tables import describe, trajectory_view, validate_path
from megatron_rl.rollouts import SamplingTruth, write_shard
from tests.unit.rollouts.records import HEADER, MODEL, changed, sound

TOOL = Path(__file__).parents[3] / "tools/inspect_rollouts.py"


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def verdict(path: Path, **options) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    return validate_path(path, console=console, **options), console.file.getvalue()


def test_sound_directory(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(0), sound(1)], name="a")
    code, text = verdict(tmp_path, expected=MODEL, temperature=1.0, current_version=3, replay=True)
    assert code == 0 and "1 shards, 0 faults" in text and "completed 2" in text
    assert verdict(tmp_path / "a.arrow")[0] == 0


def test_every_fault_is_printed(tmp_path: Path) -> None:
    bad = sound(1, reward=float("nan"), tokens=changed(sound(1).tokens, 2, 77))
    write_shard(tmp_path, replace(HEADER, sampling=SamplingTruth(top_p=0.9, top_k=5)), [sound(0), bad], name="a")
    for name in "bc":
        write_shard(tmp_path, HEADER, [sound()], name=name)
    (tmp_path / "b.arrow").write_bytes(b"ARROW1")
    (tmp_path / "stray.arrow").write_bytes((tmp_path / "c.arrow").read_bytes())
    code, text = verdict(tmp_path)
    assert code == 1 and "3 shards, 6 faults" in text
    for part in ("reward is not finite", "77 at token 2", "top_p", "top_k", "torn", "never committed"):
        assert part in text


def test_options_reach_the_checks(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(routes=None)], name="a")
    assert verdict(tmp_path)[0] == 0
    for options in (
        {"replay": True},
        {"current_version": 2},
        {"temperature": 0.5},
        {"expected": replace(MODEL, topk=1)},
    ):
        assert verdict(tmp_path, **options)[0] == 1, options


@pytest.mark.parametrize("content", [None, "empty"])
def test_nothing_there(tmp_path: Path, content: str | None) -> None:
    code, text = verdict(tmp_path if content else tmp_path / "absent")
    assert code == 1 and ("no committed shard" in text or "missing" in text)


def test_description_and_trajectory(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(0)], name="a")
    assert "toy_moe" in printed(describe(tmp_path)) and "a.arrow" in printed(describe(tmp_path / "a.arrow"))
    boundary = np.array([9], np.int32)
    routes = changed(sound().routes, (0, 0), 255)
    text = printed(trajectory_view(sound(boundary_tokens=boundary, routes=routes), HEADER))
    assert "turn 0 2 3" in text and "log-probs -0.500 -0.500" in text and "turn reward 0.25" in text
    assert "turn 1 5" in text and "boundary 9" in text and "completed (terminated), reward 1.5" in text
    assert "Expert load" in text
    assert "word-5" in printed(trajectory_view(sound(), HEADER, lambda ids: " ".join(f"word-{i}" for i in ids)))


def run_tool(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(TOOL), run_name="__main__")
    return caught.value.code


def test_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    write_shard(tmp_path, HEADER, [sound(0), sound(1)], name="a")
    assert run_tool(monkeypatch, tmp_path) == 0 and "toy_moe" in capsys.readouterr().out
    assert run_tool(monkeypatch, tmp_path, "--row", 1) == 0 and "trajectory-1" in capsys.readouterr().out
    assert run_tool(monkeypatch, tmp_path, "--row", 2) == 1 and "no such row" in capsys.readouterr().err
