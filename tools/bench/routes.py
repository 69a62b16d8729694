"""How many route bytes a pipeline stage reads of a recorded rollout, and how many the kernel read for it.

Writes a synthetic rollout of 94 MoE layers with 128 experts, top-8, then reads it once for each stage of PP=4, in a
process of its own. "sliced" counts the bytes copied out. "resident" asks the kernel which pages of the shard its page
cache holds (mincore) after the cache was emptied; "faulted" is what /proc/self/smaps says this process mapped of the
file. Those two hold whole pages and the other columns too, so they lie a little above. All are shares of the
route bytes.

    python tools/bench/routes.py [--tokens 4096] [--trajectories 4] [--data-ranks 1] [--directory DIR]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

# Runs from a checkout without installing it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.rollouts import (  # noqa: E402
    ModelFingerprint,
    RolloutHeader,
    SamplingTruth,
    Trajectory,
    read_batch,
    read_manifest,
    write_shard,
)
from megatron_rl.rollouts.routes import slice_routes, stage_layers  # noqa: E402

LAYERS, EXPERTS, TOPK, STAGES = 94, 128, 8, 4
LIMIT = 0.27


def synthetic(number: int, length: int) -> Trajectory:
    """A trajectory whose rows are `TOPK` distinct experts."""
    generator = np.random.default_rng(number)
    first = generator.integers(0, EXPERTS, (LAYERS, length - 1, 1))
    routes = ((first + 17 * np.arange(TOPK)) % EXPERTS).astype(np.uint8)
    mask = np.arange(length) >= length // 2
    return Trajectory(
        trajectory_id=str(number),
        prompt_id=str(number),
        group_id=str(number),
        tokens=generator.integers(0, 1000, length).astype(np.int32),
        action_mask=mask,
        turn_id=np.where(mask, 0, -1).astype(np.int16),
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        version=np.zeros(length, np.int32),
        turn_rewards=np.zeros(1, np.float32),
        reward=0.0,
        outcome="completed",
        terminated=True,
        truncated=False,
        routes=routes,
    )


def header() -> RolloutHeader:
    model = ModelFingerprint("synthetic", 1000, EXPERTS, TOPK, tuple(range(LAYERS)), "none")
    return RolloutHeader(model, SamplingTruth(), "bench/1")


def stage_bounds(stage: int) -> tuple[int, int]:
    """Decoder layers [first, last) of a stage, the remainder going to the first stages."""
    sizes = [LAYERS // STAGES + (rank < LAYERS % STAGES) for rank in range(STAGES)]
    return sum(sizes[:stage]), sum(sizes[: stage + 1])


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget the file's (clean) pages."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(path: Path) -> int:
    """Bytes of the file in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        buffer = (ctypes.c_char * size).from_buffer(mapping)
        code = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(buffer), ctypes.c_size_t(size), flags)
        del buffer
    if code != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((np.frombuffer(flags, np.uint8) & 1).sum()) * mmap.PAGESIZE


def mapped_bytes(path: Path) -> int:
    """Bytes of the file that this process has touched or had mapped around a fault (Rss in /proc/self/smaps)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if "-" in name and not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def read_as_stage(path: Path, stage: int, data_rank: int, data_ranks: int) -> None:
    """What one rank does; prints `sliced resident faulted seconds`."""
    began = time.perf_counter()
    batch = read_batch(path, verify_checksums=False)
    layers = stage_layers(batch.header.fingerprint.moe_layers, *stage_bounds(stage))
    mine = [slice_routes(routes, layers) for routes in batch.routes[data_rank::data_ranks] if routes is not None]
    seconds = time.perf_counter() - began
    print(sum(routes.nbytes for routes in mine), resident_bytes(path), mapped_bytes(path), seconds)


def measure(path: Path, total: int, data_ranks: int) -> float:
    """Print one line for each stage; return the largest share sliced."""
    worst = 0.0
    for stage in range(STAGES):
        drop_cache(path)
        before = resident_bytes(path)
        command = [sys.executable, __file__, "--as-stage", str(stage), str(path), "--data-ranks", str(data_ranks)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        sliced, resident, faulted = map(int, output[:3])
        worst = max(worst, sliced / total)
        print(
            f"stage {stage}: sliced {sliced:>12,} ({sliced / total:.4f})  resident {resident / total:.4f} "
            f"(before {before / total:.4f})  faulted {faulted / total:.4f}  {float(output[3]):.3f} s"
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each trajectory")
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument("--data-ranks", type=int, default=1, help="data ranks that share the sequences")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--as-stage", nargs=2, metavar=("STAGE", "SHARD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_stage:
        stage, path = arguments.as_stage
        read_as_stage(Path(path), int(stage), 0, arguments.data_ranks)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        batch = [synthetic(number, arguments.tokens) for number in range(arguments.trajectories)]
        write_shard(directory, header(), batch, name="bench")
        (shard,) = read_manifest(directory)
        total = sum(trajectory.routes.nbytes for trajectory in batch if trajectory.routes is not None)
        fed = sum(len(trajectory.tokens) - 1 for trajectory in batch)
        print(f"shard {shard.bytes:,} bytes, routes {total:,}: {total / fed / LAYERS:.3f} bytes per token and layer")
        worst = measure(Path(directory) / shard.file, total, arguments.data_ranks)
    print(f"largest share of a rank {worst:.4f}, limit {LIMIT}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
