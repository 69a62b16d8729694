"""Write the arithmetic dataset beside this file: every sum of two one-digit numbers, and its vocabulary.

    python examples/prompts/arithmetic.py --help

`arithmetic.jsonl` has a row for each ordered pair, `{"prompt": "3+4=", "answer": 7}`; `vocabulary.json` has one id a
character, so that a tiny model can speak it. Nothing is drawn: the files are the same on every machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CHARACTERS = "0123456789+="


def arithmetic_rows(largest: int) -> list[dict[str, object]]:
    """(largest + 1)² rows: a + b for all a, b in 0..largest, in order."""
    numbers = range(largest + 1)
    return [{"prompt": f"{a}+{b}=", "answer": a + b} for a in numbers for b in numbers]


def main(
    output: Path = typer.Option(Path(__file__).parent, help="Directory of both files."),
    largest: int = typer.Option(9, help="Largest number added."),
) -> None:
    """Write arithmetic.jsonl and vocabulary.json."""
    from megatron_rl.environments.codecs import character_vocabulary

    rows = arithmetic_rows(largest)
    (output / "arithmetic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    character_vocabulary(CHARACTERS).save(output / "vocabulary.json")
    print(f"{len(rows)} rows in {output / 'arithmetic.jsonl'}")


if __name__ == "__main__":
    typer.run(main)
