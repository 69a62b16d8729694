"""Every command that the documents show exists and takes the options shown; the files they name are there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.docs_site import PAGES as MADE
from tools.docs_site import api_pages, site_links
from tools.house import PACKAGE, read_modules

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / name for name in MADE), *sorted((ROOT / "docs").glob("*.md"))]
PATH = r"`((?:megatron_rl|examples|tools|docs|slurm|tests|requirements)/[\w./-]+)`"


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
    targets += [ROOT / path for path in re.findall(PATH, text)]
    assert [str(target) for target in targets if not target.exists()] == []


def test_components_are_where_the_map_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(rf"^\| `(\w+)` \| .* \| {PATH} \|$", text, re.M)
    assert len(rows) > 30
    assert [name for name, path in rows if f"\nclass {name}" not in (ROOT / path).read_text()] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = re.sub(r"!!python/name:\S+", "''", (ROOT / "properdocs.yml").read_text())
    listed = re.findall(r"[\w.]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(listed) == sorted([*MADE.values(), *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_api_pages_hold_every_public_module_once() -> None:
    entries = re.findall(r"^::: (\S+)$", "\n".join(api_pages(ROOT).values()), re.M)
    public = [name for name in read_modules(ROOT) if "._" not in name and not name.startswith("__main")]
    assert sorted(entries) == sorted(PACKAGE if name == "__init__" else f"{PACKAGE}.{name}" for name in public)


def test_links_of_the_checkout_become_links_of_the_site() -> None:
    assert site_links("[a](docs/hf.md) [b](../CONTRIBUTING.md) [c](README.md)") == (
        "[a](hf.md) [b](CONTRIBUTING.md) [c](index.md)"
    )
    assert (
        site_links("[a](async.md#groups) [b](https://a.org/docs/x)") == "[a](async.md#groups) [b](https://a.org/docs/x)"
    )
