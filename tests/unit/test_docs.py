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


def test_tables_of_methods_are_up_to_date() -> None:
    from tools import methods_table

    page = (ROOT / "docs" / "objectives.md").read_text()
    assert methods_table.with_tables(page) == page, "run python tools/methods_table.py --write"


def test_every_renamed_key_is_in_the_changelog() -> None:
    from megatron_rl.config.renamed import RENAMED, RESHAPED

    text = (ROOT / "CHANGELOG.md").read_text()
    assert [key for key in (*RENAMED, *RESHAPED) if f"`{key}" not in text] == []


def test_the_methods_of_the_guide_are_read_and_differentiate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_rl.config import load_config
    from megatron_rl.methods import PolicyInputs, Segments

    blocks = re.findall(r"```(python|yaml)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    source = next(text for kind, text in blocks if kind == "python" and "my_loss" in text)
    settings = next(text for kind, text in blocks if kind == "yaml" and "my_package" in text)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/losses.py").write_text(source)
    (tmp_path / "run.yaml").write_text(settings)
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = load_config(tmp_path / "run.yaml").algorithm
    assert algorithm.policy.strength == 2.0
    turns = load_config(tmp_path / "run.yaml", ["algorithm.policy=my_package.losses:MyTurnLoss"]).algorithm.policy
    whole = Segments(torch.tensor([0, 3]), torch.tensor([0, 2, 3]), torch.zeros(1, dtype=torch.int64), None)
    for policy in (algorithm.policy, turns):
        logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        anchor = torch.tensor([-1.2, -1.0, -0.1])
        term = policy.loss(PolicyInputs(logprobs, anchor, anchor, torch.ones(3), segments=whole))
        (gradient,) = torch.autograd.grad(term.loss.sum(), logprobs)
        assert gradient.isfinite().all() and gradient.abs().min() > 0
