"""The parts of the documentation site that are made, as hooks of `properdocs.yml`; `make docs` builds it.

* README, CONTRIBUTING and CHANGELOG become pages, their links those of the site.
* Each folder of the package becomes an API page with its modules' docstrings. They are read from the source: nothing is
  imported, so neither a GPU nor vLLM need be there.
* A public module, class, function or method without a docstring ends the build.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.house import PACKAGE, Function, Module, read_modules  # noqa: E402

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""File of the checkout → page of the site."""


def undocumented(source: str) -> list[str]:
    """Public classes, functions and methods that have no docstring, as dotted names; `<module>` for the module."""
    tree = ast.parse(source)
    return ([] if ast.get_docstring(tree) else ["<module>"]) + _undocumented(tree.body, "")


def _undocumented(body: list[ast.stmt], prefix: str) -> list[str]:
    found = []
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found += _undocumented(node.body, f"{prefix}{node.name}.")
    return found


def is_public(module: Module) -> bool:
    """Whether a module is documented: no part of its name begins with an underscore, but entrances of folders are."""
    return not any(part.startswith("_") for part in module.name.split(".")) or module.name == "__init__"


def api_pages(root: Path) -> dict[str, str]:
    """Page → its Markdown: one for each folder of the package, and one for the modules beside them."""
    folders: dict[str, list[Module]] = {}
    for module in filter(is_public, read_modules(root).values()):
        parent = Path(module.file).parent.relative_to(PACKAGE)
        folders.setdefault(".".join(parent.parts) or PACKAGE, []).append(module)
    return {f"api/{folder}.md": _api_page(folder, modules) for folder, modules in folders.items()}


def _api_page(folder: str, modules: list[Module]) -> str:
    return "\n\n".join([f"# {folder}", *(_api_entry(module) for module in modules)]) + "\n"


def _api_entry(module: Module) -> str:
    name = PACKAGE if module.name == "__init__" else f"{PACKAGE}.{module.name}"
    if module.stem != "__init__":
        return f"::: {name}"
    # What it only hands on is on the page of the module that it is from.
    tree = ast.parse((ROOT / module.file).read_text())
    own = [node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    return f"::: {name}\n    options:\n      members: {own or 'false'}"


def site_links(markdown: str) -> str:
    """Links between files of the checkout, as links between pages of the site: `docs/` is its top."""
    markdown = re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
    for file, page in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(file)}", f"]({page}", markdown)
    return markdown


def on_config(config: Any) -> Any:
    """Refuses to go on where docstrings are missing; adds the API pages to the navigation.

    Raises:
        SystemExit: with the names that have none.
    """
    missing = {
        module.file: names
        for module in read_modules(ROOT).values()
        if is_public(module) and (names := undocumented((ROOT / module.file).read_text()))
    }
    if missing:
        sys.exit("without a docstring: " + "; ".join(f"{file}: {', '.join(names)}" for file, names in missing.items()))
    pages = [{Path(page).stem: page} for page in sorted(api_pages(ROOT))]
    config["nav"] = [*config["nav"], {"API": pages}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/."""
    from properdocs.structure.files import File

    made = {page: (ROOT / file).read_text() for file, page in PAGES.items()} | api_pages(ROOT)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes links of the checkout links of the site."""
    return site_links(markdown)
