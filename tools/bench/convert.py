"""What reading and writing a Qwen3-MoE checkpoint costs over copying its files.

    python tools/bench/convert.py                 # 4 GB in a temporary folder, removed afterwards
    python tools/bench/convert.py --gigabytes 1 --folder /scratch

In one run, in turn, each in a process of its own, from files that are not in the page cache:

* copy: every file copied by `shutil.copyfile` and made durable.
* import: `import_hf` into a bfloat16 Megatron model of one rank; building the model is not counted.
* export: `convert` to another directory, with hashes, checks and manifest, made durable.
* verify: both directories read again and compared bit for bit.

Memory is what a process has beyond what it had before the timed part: private pages (the peak of RssAnon, sampled every
10 ms), and apart from them pages of mapped files, which the kernel takes back when it needs room.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPE = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], vocab_size=32_000, hidden_size=2048,
    num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
    moe_intermediate_size=768, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=4096,
    rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    hidden_act="silu", dtype="bfloat16",
)  # fmt: skip
"""Widths of Qwen3-30B-A3B; the number of experts makes up the size."""
Side = Callable[[Path], contextlib.AbstractContextManager[Callable[[], None]]]
"""Prepares on entering, and gives what is timed."""
BYTES_PER_EXPERT = 4 * 3 * 2048 * 768 * 2
FILE_BYTES = 1_000_000_000


def main(
    gigabytes: float = typer.Option(4.0, help="Size of the checkpoint, at least 0.6."),
    repeats: int = typer.Option(2, help="Timed runs of each side; medians are shown."),
    folder: Path = typer.Option(None, help="Where to put it; default: the system's temporary folder."),
) -> None:
    """Print seconds, ratios and peaks."""
    experts = max(8, round((gigabytes * 1e9 - 0.35e9) / BYTES_PER_EXPERT))
    free = shutil.disk_usage(folder or tempfile.gettempdir()).free
    if free < 3.5e9 * gigabytes:
        raise SystemExit(f"{free / 1e9:.1f} GB free, {3.5 * gigabytes:.1f} GB needed: choose --folder or --gigabytes")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source = write_source(Path(name) / "source", experts)
        files = sorted(source.glob("*.safetensors"))
        size, largest = sum(f.stat().st_size for f in files), 32_000 * 2048 * 2
        print(f"{size / 1e9:.2f} GB in {len(files)} files, {experts} experts x 4 layers, bfloat16", flush=True)
        found = {side.__name__: [] for side in (copy, read, import_model, export, verify_export)}
        for _ in range(repeats):
            for side in (copy, read, import_model, export, verify_export):
                evict(source), evict(source.with_name("target"))
                found[side.__name__].append(in_process(side, source))
    Console(width=110).print(table(found, size, largest))


def table(found: dict[str, list[tuple[float, int, int]]], size: int, largest: int) -> Table:
    """One row a side."""
    shown = Table("what", "seconds", "GB/s", "over copy", "wanted", "private GB", "wanted", "mapped GB")
    bounds = {
        "import_model": ("<= 1.5", f"<= {(size + 2 * largest) / 1e9:.2f}"),
        "export": ("<= 1.5", "bounded"),
    }
    base = statistics.median(seconds for seconds, _, _ in found["copy"])
    for name, runs in found.items():
        seconds = statistics.median(run[0] for run in runs)
        private, mapped = (max(run[i] for run in runs) / 1e9 for i in (1, 2))
        ratio, memory = bounds.get(name, ("", ""))
        shown.add_row(
            name, f"{seconds:.1f}", f"{size / 1e9 / seconds:.2f}", f"{seconds / base:.2f}", ratio, f"{private:.2f}",
            memory, f"{mapped:.2f}",
        )  # fmt: skip
    return shown


def write_source(path: Path, experts: int) -> Path:
    """A checkpoint of random bfloat16 values in files of about 1 GB, with an index."""
    from megatron_rl.hf.config import read_hf_config
    from megatron_rl.hf.inventory import expected_names

    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPE | {"num_experts": experts}))
    noise = (0.02 * torch.randn(32_000 * 2048 + 4096)).bfloat16()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(in_files(expected_names(read_hf_config(path)))):
        file = f"model-{number + 1:05d}.safetensors"
        tensors = {
            name: noise[len(weight_map) % 4096 :][: shape.numel()].view(shape).clone() for name, shape in names.items()
        }
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def in_files(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, torch.Size]]:
    """Layers in order, as released checkpoints are, cut into files."""
    group: dict[str, torch.Size] = {}
    held = 0
    for name in sorted(shapes, key=lambda name: (name.split(".")[2] if "layers" in name else "", name)):
        group[name] = torch.Size(shapes[name])
        held += 2 * group[name].numel()
        if held >= FILE_BYTES:
            yield group
            group, held = {}, 0
    if group:
        yield group


def evict(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_process(side: Side, source: Path) -> tuple[float, int, int]:
    """(seconds, peak private bytes, peak mapped bytes) of one side in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (side, source))


def measured(side: Side, source: Path) -> tuple[float, int, int]:
    """Prepare, then time the rest and watch this process's memory."""
    with side(source) as run:
        before, peak, stop = resident(), [0, 0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.01):
                peak[:] = [max(a, b - c) for a, b, c in zip(peak, resident(), before, strict=True)]

        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.perf_counter()
        run()
        seconds = time.perf_counter() - begin
        stop.set()
        watcher.join()
    return seconds, *peak


def resident() -> tuple[int, int]:
    """Private and file-mapped resident bytes of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private, mapped = (int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
    return private, mapped


@contextlib.contextmanager
def copy(source: Path) -> Iterator[Callable[[], None]]:
    """Plain copies, durable."""
    target = source.with_name("copy")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()

    def run() -> None:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, target / file.name)
            descriptor = os.open(target / file.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        # Not needed again, and room for the other sides.
        shutil.rmtree(target)

    yield run


@contextlib.contextmanager
def read(source: Path) -> Iterator[Callable[[], None]]:
    """Every byte read once, kept nowhere."""
    buffer = bytearray(16 << 20)

    def run() -> None:
        for file in sorted(source.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    yield run


@contextlib.contextmanager
def import_model(source: Path) -> Iterator[Callable[[], None]]:
    """Fill a built model."""
    from megatron_rl.backend.model import Model, build_chunks, transformer_config
    from megatron_rl.backend.replay import RouteRegistry
    from megatron_rl.backend.sequence_outputs import one_rank
    from megatron_rl.backend.weights import import_hf
    from megatron_rl.config import ParallelConfig, PerformanceConfig
    from megatron_rl.hf.config import read_hf_config

    with one_rank() as place:
        hf = read_hf_config(source)
        config = transformer_config(hf, ParallelConfig(), PerformanceConfig(), torch.bfloat16)
        bare = build_chunks(hf, config, place, "policy")
        model = Model("policy", hf, config, place, bare, bare, RouteRegistry(bare))
        yield lambda: import_hf(model, str(source), hf)


@contextlib.contextmanager
def export(source: Path) -> Iterator[Callable[[], None]]:
    """Convert to another directory."""
    from megatron_rl.hf.conversion.conversion import convert
    from megatron_rl.hf.conversion.output_files import make_plan
    from megatron_rl.hf.conversion.sources import HFSource

    target = source.with_name("target")
    shutil.rmtree(target, ignore_errors=True)

    def run() -> None:
        opened = HFSource(source)
        convert(opened, target, make_plan(opened, max_shard_bytes=FILE_BYTES))

    yield run


@contextlib.contextmanager
def verify_export(source: Path) -> Iterator[Callable[[], None]]:
    """Compare what `export` left."""
    from megatron_rl.hf.conversion.output_files import make_plan
    from megatron_rl.hf.conversion.sources import HFSource
    from megatron_rl.hf.conversion.verify import verify

    def run() -> None:
        opened = HFSource(source)
        verify(opened, source.with_name("target"), make_plan(opened, max_shard_bytes=FILE_BYTES))

    yield run


if __name__ == "__main__":
    typer.run(main)
