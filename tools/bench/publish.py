"""What it takes to get new weights from the trainer into a vLLM server, over the time to copy the same bytes.

    python tools/bench/publish.py             # ~100 M parameters in bfloat16 (200 MB), one rank, one server
    python tools/bench/publish.py --help

Needs the environment of `make setup-vllm`. Per repeat, alternating: copy the weights file within the same file system
(cached, then flushed, as publishing flushes); publish (export, write, checksum, flush, rename); load (check checksums,
pause, load, compare parameters, resume). All of it competes for the same cores on a machine without a GPU.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPE = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "num_experts": 16,
         "moe_hidden_size": 512}  # fmt: skip
PARTS = ("copy", "publish", "load")


def main(
    repeats: int = typer.Option(5, help="Timed publications after one that warms up."),
    directory: Path = typer.Option(Path("/dev/shm"), help="File system to publish on: shared memory, or a disk."),
) -> None:
    """Print seconds and the ratio (publish + load) / copy."""
    from megatron_rl.engines.vllm.options import VllmOptions
    from megatron_rl.engines.vllm.pool import VllmEngine
    from megatron_rl.engines.vllm.remote import HttpReplica
    from megatron_rl.engines.vllm.server import LocalServer
    from megatron_rl.launch.environment import ranks

    with tempfile.TemporaryDirectory(dir=directory) as folder, ranks(_config("")) as topology:
        model = Path(folder) / "model"
        agents = _agents(model, topology)
        options = VllmOptions(model, max_model_len=256, max_num_seqs=16, kv_cache_bytes=64 << 20)
        with (
            LocalServer(options, Path(folder) / "server.log") as server,
            VllmEngine([HttpReplica(server.url)], model) as engine,
        ):
            seconds, size = _measure(agents, engine, Path(folder), repeats)
    _show(seconds, size)


def _config(path: str):
    from megatron_rl.config import parse_config

    actor_only = {"advantage": "grpo"}
    return parse_config({"model": {"path": path, "dtype": "bfloat16"}, "algorithm": actor_only})


def _agents(path: Path, topology):
    import torch
    from safetensors.torch import load_file, save_file

    from megatron_rl.engines.environments import Vocabulary
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.training.agents import build_agents

    write_tiny_checkpoint(path, Vocabulary([f"w{i}" for i in range(1024)]), TinyShape(**SHAPE))
    weights = path / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return build_agents(_config(str(path)), topology)


def _measure(agents, engine, folder: Path, repeats: int) -> tuple[dict[str, list[float]], int]:
    from megatron_rl.training.versions import publish

    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for repeat in range(repeats + 1):
        agents.version = repeat + 1
        published, taken = _timed(lambda: publish(agents, folder / "weights"))
        _, loaded = _timed(lambda where=published, version=repeat + 1: engine.load(where, version))
        weights = published / "model.safetensors"
        _, copied = _timed(lambda file=weights: _copy(file, folder / "copy"))
        if repeat:
            for part, value in zip(PARTS, (copied, taken, loaded), strict=True):
                seconds[part].append(value)
    return seconds, weights.stat().st_size


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as handle:
        os.fsync(handle.fileno())
    target.unlink()


def _timed(work: Callable):
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _show(seconds: dict[str, list[float]], size: int) -> None:
    ratios = [(p + n) / c for c, p, n in zip(*(seconds[part] for part in PARTS), strict=True)]
    table = Table("what", "median", "min", "max", title=f"{size / 1e6:.0f} MB of weights")
    rows = {f"{part}, s": seconds[part] for part in PARTS} | {"(publish + load) / copy": ratios}
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
