"""Every command that README and docs show exists and takes the options shown; every linked file is there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Lines of fenced blocks and inline commands, without trailing comments, each once."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
        lines += re.findall(r"`((?:python|make|torchrun) [^`]+)`", text)
        for line in lines:
            command = re.sub(r"\s+#.*", "", line).strip()
            if command.startswith(("python ", "make ", "torchrun ")):
                found[command] = None
    return list(found)


@pytest.mark.parametrize("command", commands())
def test_command_exists_and_takes_its_options(command: str) -> None:
    words = command.split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"no make target {words[1]}"
        return
    start = words.index("-m") if "-m" in words else 1
    program = words[start : start + 3] if words[start] == "-m" else [words[start]]
    options = [word for word in words[start + len(program) :] if word.startswith("--")]
    text = help_of(*program)
    assert [option for option in options if option not in text] == []


@functools.cache
def help_of(*program: str) -> str:
    """What the program says of itself; many examples are of one program."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    run = [sys.executable, *program, "--help"]
    shown = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    targets = [page.parent / target for target in targets]
    targets += [ROOT / path for path in re.findall(r"`((?:megatron_rl|examples|tools|docs|slurm)/[\w./]+)`", text)]
    assert [str(target) for target in targets if not target.exists()] == []
