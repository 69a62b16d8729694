"""Sizes, docstrings and paths of the source."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tools.docs_site import is_public, undocumented
from tools.house import code_lines, read_modules

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("megatron_rl", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MACHINE_PATH = re.compile(r"(?<![\w.})\]*~])/(?:root|work|home)(?![\w-])")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def own_files() -> list[Path]:
    """Files git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def machine_paths(text: str) -> list[str]:
    """Lines that name a folder of one particular machine."""
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def long_functions(source: str) -> list[str]:
    """Functions of more than MAX_FUNCTION_LINES lines, their docstring not counted."""
    return [
        f"{node.name} ({lines} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function) and (lines := code_lines(node)) > MAX_FUNCTION_LINES
    ]


def test_no_path_of_one_machine() -> None:
    faults = {}
    for path in own_files():
        try:
            faults[str(path.relative_to(ROOT))] = machine_paths(path.read_text())
        except UnicodeDecodeError:
            continue
    assert {name: lines for name, lines in faults.items() if lines} == {}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length >= MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    assert {str(path.relative_to(ROOT)): long for path in SOURCES if (long := long_functions(path.read_text()))} == {}


def test_public_names_have_docstrings() -> None:
    public = [ROOT / module.file for module in read_modules(ROOT).values() if is_public(module)]
    assert {str(path.relative_to(ROOT)): bare for path in public if (bare := undocumented(path.read_text()))} == {}


@pytest.mark.parametrize("folder", ["root", "work", "home"])
def test_machine_paths_are_seen(folder: str) -> None:
    assert machine_paths(f"cd /{folder}/x") and machine_paths(f'"/{folder}"')
    assert not machine_paths(f"docs/{folder}/x and $HOME/{folder} and /{folder}less and https://a.org/{folder}")


def test_long_function_and_missing_docstring_are_seen() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def f():\n{body}") == ["f (61 lines)"]
    assert long_functions(f'def f():\n    """a\n    b"""\n{body[:-9]}') == []
    assert undocumented("def f(): ...\nclass C: ...\ndef _g(): ...\n") == ["<module>", "f", "C"]
    methods = "async def m(self): ...\n  def _n(self): ...\n  def __len__(self): ...\n"
    assert undocumented(f'"""M."""\nclass C:\n  """C."""\n  {methods}') == ["C.m"]
    assert undocumented('"""M."""\nclass _C:\n  def m(self): ...\n') == []
