"""The measuring of the package, on a small planted one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import house, house_picture
from tools.house import PACKAGE, Room, circles, import_circles, main, measure, measure_commit, report

FILES = {
    "__init__.py": "",
    "errors.py": '"""Errors. More of them."""\n',
    "config/__init__.py": '"""Settings."""\nfrom megatron_rl.config.run import Run\n',
    "config/run.py": "import typing\n\nif typing.TYPE_CHECKING:\n    from . import rules\n",
    "config/rules.py": "def check():\n    from megatron_rl.config.run import Run\n    return Run\n",
    "training/__init__.py": "",
    "training/run.py": "import megatron_rl.errors\nfrom megatron_rl.config import Run\nimport torch\n" + "x = 1\n" * 40,
    "training/deep/__init__.py": "",
    "training/deep/step.py": (
        'class Step:\n    def go(self):\n        """One\n        step."""\n        return 1\n\n'
        "    def stay(self): ...\n\nfrom ..run import x\n"
    ),
}


def planted(root: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_rooms_are_measured(tmp_path: Path) -> None:
    found = measure(planted(tmp_path))
    assert {room.name: room for room in found.rooms} == {
        "config": Room("config", "Settings", 3, 9, 1, (), 3),
        "errors": Room("errors", "Errors", 1, 1, 0, (), 0),
        "training": Room("training", "", 4, 52, 2, ("config", "errors"), 1),
    }
    assert (found.files, found.lines, found.functions) == (9, 62, 3)
    assert (found.room_arrows, found.module_arrows) == (2, 6)
    assert found.longest_file == (f"{PACKAGE}/training/run.py", 43)
    assert found.longest_function == (f"{PACKAGE}/config/rules.py:check", 3)


def test_what_should_not_be_is_told(tmp_path: Path) -> None:
    found = measure(planted(tmp_path))
    assert found.circles == (("config.rules", "config.run"),)
    assert found.repeated == {"run": ("config", "training")}
    assert set(found.short) == {f"{PACKAGE}/{name}" for name in FILES if not name.endswith(("_.py", "training/run.py"))}
    text = report(found)
    assert "config.rules ↔ config.run" in text and "run: config, training" in text


def test_circles_are_found_over_several_steps() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["e2", "x"], "e2": ["e"]}) == [
        ("a", "b", "c"),
        ("e", "e2"),
    ]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_a_package_that_imports_its_parts_is_no_circle(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a/__init__.py": "from .b import x\n",
        "a/b.py": "from megatron_rl.a import c\n",
        "a/c.py": "",
    }
    assert import_circles(planted(tmp_path, files)) == []
    assert import_circles(planted(tmp_path, {"a/b.py": "from megatron_rl.a import x\n"})) == [("a", "a.b")]


def test_another_commit_is_measured(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(planted(tmp_path))]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    before = measure(tmp_path)
    planted(tmp_path, {"errors.py": "x = 1\n" * 9})
    assert measure_commit("HEAD", tmp_path) == before != measure(tmp_path)
    with pytest.raises(SystemExit, match="nowhere"):
        measure_commit("nowhere", tmp_path)


def test_command_prints_json_and_fails_on_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "ROOT", planted(tmp_path))
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["files"] == 9
    planted(tmp_path, {"config/rules.py": ""})
    assert main([]) == 0
    assert "import circles: none" in capsys.readouterr().out


def test_picture_leaves_out_what_follows_and_keeps_layers_apart() -> None:
    imports = {"cli": {"training", "errors"}, "training": {"errors", "config"}, "config": {"errors"}, "errors": set()}
    assert house_picture.reduced(imports) == {
        "cli": {"training"},
        "training": {"config"},
        "config": {"errors"},
        "errors": set(),
    }
    assert house_picture.layers_of(imports) == {"cli": 3, "training": 2, "config": 1, "errors": 0}


def test_picture_is_drawn_also_of_a_circle(tmp_path: Path) -> None:
    rooms = [
        Room("a", "One", 1, 1, 1, ("b", "c"), 0),
        Room("b", "Two", 1, 1, 1, ("c",), 0),
        Room("c", "", 1, 1, 1, (), 0),
    ]
    for number, found in enumerate((rooms, [*rooms[:2], Room("c", "", 1, 1, 1, ("a",), 0)])):
        house_picture.draw(found, tmp_path / "new" / f"{number}.png")
        assert (tmp_path / "new" / f"{number}.png").read_bytes().startswith(b"\x89PNG")
