"""What it takes to get new weights from the trainer into a vLLM server, over the time to copy the same bytes.

    python tools/bench/publish.py             # two layers of Qwen3-30B-A3B with 16 experts, one rank, one server
    python tools/bench/publish.py --help

Needs the environment of `make setup-vllm`. Per repeat, alternating: publish (export, check, write, hash, flush,
rename); load (compare checksums, pause, load, compare parameters, resume); copy the weights file within the same file
system (cached, then flushed, as publishing flushes). `vLLM's reload` is what vLLM's own loader takes inside its worker
for tensors that lie in mapped files: no load can be faster. All of it competes for the same cores on a machine without
a GPU.
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

SHAPE = {"hidden_size": 2048, "num_layers": 2, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "num_experts": 16,
         "moe_hidden_size": 768}  # fmt: skip
"""Matrices as large as those of Qwen3-30B-A3B, only fewer: what a tensor costs beside its bytes weighs as there."""
SETTLE = 1.0
"""Seconds before everything that is timed. In a run an update lies between: what the server still does after a load (it
frees what it read) is not charged to whoever comes next."""
ONE_PROCESS = {"distributed_executor_backend": "uni"}
STEPS = {
    "check": "compare checksums",
    "pause": "pause",
    "load_directory": "load in the worker",
    "reload": "of it vLLM's reload",
    "differing_parameters": "compare parameters",
    "resume": "resume",
}


def main(
    repeats: int = typer.Option(5, help="Timed publications after one that warms up."),
    directory: Path = typer.Option(Path("/dev/shm"), help="File system to publish on: shared memory, or a disk."),
) -> None:
    """Print seconds, and ratios over the copy."""
    from megatron_rl.engines.vllm.engine import VllmEngine
    from megatron_rl.engines.vllm.options import VllmOptions
    from megatron_rl.engines.vllm.server import LocalServer
    from megatron_rl.launch.environment import ranks

    with tempfile.TemporaryDirectory(dir=directory) as folder, ranks(_config("")) as topology:
        model = Path(folder) / "model"
        models = _agents(model, topology)
        options = VllmOptions(model, max_model_len=256, max_num_seqs=16, kv_cache_bytes=64 << 20, extra=ONE_PROCESS)
        with LocalServer(options, Path(folder) / "server.log") as server:
            replica, steps = _timed_replica(server.url)
            with VllmEngine([replica], model) as engine:
                seconds, size = _measure(models, engine, steps, Path(folder), repeats)
    _show(seconds, size)


def _config(path: str):
    from megatron_rl.config import parse_config

    actor_only = {"advantage": "grpo"}
    return parse_config({"model": {"path": path, "dtype": "bfloat16"}, "algorithm": actor_only})


def _agents(path: Path, topology):
    import torch
    from safetensors.torch import load_file, save_file

    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.vocabulary import Vocabulary
    from megatron_rl.training.actor_critic import build_actor_critic

    write_tiny_checkpoint(path, Vocabulary([f"w{i}" for i in range(1024)]), TinyShape(**SHAPE))
    weights = path / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return build_actor_critic(_config(str(path)), topology)


def _timed_replica(url: str):
    """A replica, and the seconds that its steps took since they were last cleared."""
    from megatron_rl.engines.vllm.http_replica import HttpReplica

    steps: dict[str, float] = {}

    class Timed(HttpReplica):
        async def pause(self) -> None:
            start = time.perf_counter()
            await super().pause()
            steps["pause"] = time.perf_counter() - start

        async def resume(self) -> None:
            start = time.perf_counter()
            await super().resume()
            steps["resume"] = time.perf_counter() - start

        async def _on_workers(self, method: str, **named: str) -> list:
            start = time.perf_counter()
            found = await super()._on_workers(method, **named)
            steps[method] = time.perf_counter() - start
            if method == "load_directory":
                # The server hands results over as text.
                steps["reload"] = max(map(float, found))
            return found

    return Timed(url), steps


def _measure(models, engine, steps: dict, folder: Path, repeats: int) -> tuple[dict[str, list[float]], int]:
    from megatron_rl.engines.publication import check_publication
    from megatron_rl.training.weights import publish_weights

    seconds: dict[str, list[float]] = {part: [] for part in ("copy", "publish", "load", *STEPS)}
    for repeat in range(repeats + 1):
        models.version = version = repeat + 1
        published, taken = _timed(lambda: publish_weights(models, folder / "weights"))
        _, loaded = _timed(lambda where=published, version=version: engine.load(where, version))
        weights = published / "model.safetensors"
        _, copied = _timed(lambda file=weights: _copy(file, folder / "copy"))
        _, checked = _timed(lambda where=published, version=version: check_publication(where, version))
        if repeat:
            found = {"copy": copied, "publish": taken, "load": loaded, "check": checked} | steps
            for part, values in seconds.items():
                values.append(found[part])
    return seconds, weights.stat().st_size


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as handle:
        os.fsync(handle.fileno())
    target.unlink()


def _timed(work: Callable):
    time.sleep(SETTLE)
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _show(seconds: dict[str, list[float]], size: int) -> None:
    table = Table("what", "median", "min", "max", title=f"{size / 1e6:.0f} MB of weights")
    rows = {f"{part}, s": seconds[part] for part in ("copy", "publish", "load")}
    rows |= {f"  {name}, s": seconds[step] for step, name in STEPS.items()}
    ratios = {
        "publish / copy": ("publish",), "load / copy": ("load",), "(publish + load) / copy": ("publish", "load"),
        "vLLM's reload / copy": ("reload",),
    }  # fmt: skip
    for name, parts in ratios.items():
        rows[name] = [sum(taken) / copy for copy, *taken in zip(seconds["copy"], *map(seconds.get, parts), strict=True)]
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
