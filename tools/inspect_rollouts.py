"""Show recorded rollouts: a table a shard, or one trajectory as coloured turns.

python tools/inspect_rollouts.py PATH [--row N] [--tokenizer DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

# Runs from a checkout without installing it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.errors import RolloutError  # noqa: E402
from megatron_rl.observe.rollout_tables import describe, trajectory_view  # noqa: E402
from megatron_rl.rollouts import read_batch, trajectory_at  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="rollout directory or one shard")
    parser.add_argument("--row", type=int, help="0-based trajectory to show (of the directory, in shard order)")
    parser.add_argument("--tokenizer", help="local HF tokenizer directory, to show text instead of token ids")
    arguments = parser.parse_args()
    try:
        Console().print(_show(arguments))
    except RolloutError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show(arguments: argparse.Namespace):
    if arguments.row is None:
        return describe(arguments.path)
    batch = read_batch(arguments.path, verify_checksums=False)
    if not 0 <= arguments.row < len(batch):
        raise RolloutError("no such row", file=arguments.path, found=arguments.row, expected=f"0..{len(batch) - 1}")
    return trajectory_view(trajectory_at(batch, arguments.row), batch.header, _decoder(arguments.tokenizer))


def _decoder(directory: str | None):
    if directory is None:
        return None
    from transformers import AutoTokenizer  # heavy, and only needed here

    return AutoTokenizer.from_pretrained(directory, local_files_only=True).decode


if __name__ == "__main__":
    sys.exit(main())
