"""The methods a run can choose by name, as tables of docs/objectives.md.

    python tools/methods_table.py            # prints them
    python tools/methods_table.py --write    # puts them between the page's markers

They are made from `megatron_rl.methods`: what is registered there is here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Runs from a checkout without installing it.
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "objectives.md"
BEGIN, END = "<!-- methods: made by tools/methods_table.py -->", "<!-- /methods -->"
Row = Callable[[Any], tuple[str, ...]]


def options(method: Any) -> str:
    """`name=default` of each option, without `name`."""
    shown = []
    for name, field in method.model_fields.items():
        if name != "name":
            default = "…" if field.is_required() else "null" if field.default is None else field.default
            shown.append(f"`{name}={str(default).lower() if isinstance(default, bool) else default}`")
    return " ".join(shown)


def first_sentence(method: Any) -> str:
    """Of its docstring, on one line."""
    return " ".join((method.__doc__ or "").split("\n\n")[0].split())


def yes(fact: object) -> str:
    """A fact that holds is a word, one that does not is nothing."""
    return "yes" if fact else ""


def policy_row(method: Any) -> tuple[str, ...]:
    """Of a policy loss."""
    units, anchors = ", ".join(sorted(method.advantages)), ", ".join(sorted(method.anchors))
    return method.clock, units, anchors, method.default_aggregation, yes(method.importance), options(method)


def estimator_row(method: Any) -> tuple[str, ...]:
    """Of an estimator."""
    return method.unit, yes(method.needs_critic), yes(method.needs_groups), options(method)


def plain_row(method: Any) -> tuple[str, ...]:
    """Of a method with nothing but options."""
    return (options(method),)


TABLES: dict[str, tuple[tuple[str, ...], Row]] = {
    "algorithm.policy": (
        ("one loss a", "advantage a", "anchors", "default aggregation", "importance", "options"), policy_row,
    ),
    "algorithm.estimator": (("advantage a", "critic", "groups", "options"), estimator_row),
    "algorithm.importance": (("options",), plain_row),
    "algorithm.aggregation": (("options",), plain_row),
    "algorithm.anchor": (("options",), plain_row),
    "algorithm.reference_kl": (("options",), plain_row),
}  # fmt: skip


def tables() -> str:
    """All of them, as Markdown."""
    from megatron_rl.methods import KINDS

    parts = []
    for setting, (head, row) in TABLES.items():
        lines = [f"**`{setting}`**", "", f"| name | what | {' | '.join(head)} |", "|---" * (2 + len(head)) + "|"]
        for name, method in KINDS[setting].table.items():
            lines.append(f"| `{name}` | {first_sentence(method)} | {' | '.join(row(method))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def with_tables(page: str) -> str:
    """The page with the present tables between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Tables of the methods a run can choose by name.")
    parser.add_argument("--write", action="store_true", help="put them into docs/objectives.md")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())


if __name__ == "__main__":
    main()
