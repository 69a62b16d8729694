"""Random faults over one run on a local SLURM; it must end like a run that nothing disturbed.

    python tests/slurm/soak.py --kills 20            # prints its seed; --seed repeats the same faults

Faults: a rank killed, a node cut off, the stop signal, the disk full for a while. Each waits until the run has
recovered from the one before. Recovery is the time from the fault to the first iteration that the restarted run
records; that of a full disk includes the time it was full. Needs root, for a file system of its own that can be
filled; without it the disk is left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.slurm.harness import (
    NODES,
    Cluster,
    assert_same_run,
    log_text,
    metrics,
    rank_process,
    submit,
    until,
    write_model,
)

ITERATIONS_A_FAULT = 3
DISK_BYTES = 256 << 20


@dataclass(frozen=True)
class Soak:
    """A run under fire."""

    cluster: Cluster
    output: Path
    job: str
    draw: random.Random
    disk_seconds: float

    def rank(self) -> None:
        """Kill one rank."""
        number = self.draw.randrange(NODES)
        process = until(lambda: rank_process(self.job, number), 120, f"rank {number} runs")
        os.kill(process, signal.SIGKILL)

    def node(self) -> None:
        """Cut a node off, and boot it again once SLURM has noticed."""
        node = self.draw.choice(until(lambda: self.cluster.nodes_of(self.job), 60, "nodes"))
        self.cluster.kill_node(node)
        until(lambda: self.cluster.state(self.job) != "RUNNING", 120, f"SLURM misses {node}")
        self.cluster.start_node(node)

    def stop(self) -> None:
        """The signal before a time limit."""
        self.cluster.run("scancel", "--batch", "--signal=USR1", self.job)

    def disk(self) -> None:
        """Fill the disk for a while."""
        ballast = self.output.parent / "ballast"
        with open(ballast, "wb", buffering=0) as stream, suppress(OSError):
            while stream.write(bytes(1 << 16)):
                pass
        time.sleep(self.disk_seconds)
        ballast.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """`folder` on a file system of its own; yields whether that was possible."""
    folder.mkdir()
    mounted = not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", str(folder)], stderr=subprocess.DEVNULL
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.call(["umount", "--lazy", str(folder)])


def torment(soak: Soak, kinds: list[str], iterations: int) -> list[tuple[str, float]]:
    """Carry out the faults at random iterations; returns (kind, seconds of recovery) of each."""
    moments = sorted(soak.draw.sample(range(1, iterations - 2), len(kinds)))
    recoveries = []
    for kind, moment in zip(kinds, moments, strict=True):
        until(lambda moment=moment: len(metrics(soak.output)) >= moment, 300, f"iteration {moment}")
        time.sleep(soak.draw.uniform(0, 1.5))
        starts, start = len(started(soak.output)), time.monotonic()
        getattr(soak, kind)()
        until(lambda starts=starts: len(started(soak.output)) > starts, 300, f"a start after {kind} at {moment}")
        # Counted now: what was asked to stop finishes its iteration first.
        rows = len(metrics(soak.output))
        until(lambda rows=rows: len(metrics(soak.output)) > rows, 300, f"recovery from {kind} at {moment}")
        recoveries.append((kind, time.monotonic() - start))
        print(f"iteration {moment:3}: {kind:5} recovered in {recoveries[-1][1]:.0f} s", flush=True)
    return recoveries


def started(output: Path) -> list[Path]:
    """A log for each time the job's ranks were started."""
    return list((output / "slurm").glob("job-*-restart-*-train.log"))


def run(kills: int, seed: int, disk_seconds: float, folder: Path) -> None:
    """The whole soak in an empty folder."""
    draw, iterations = random.Random(seed), ITERATIONS_A_FAULT * kills + 4
    cluster = Cluster(folder / "c", SLURM_LOCAL_NODE_TIMEOUT="10", SLURM_LOCAL_REQUEUE_DELAY="5")
    file = write_model(folder)
    overrides = [f"iterations={iterations}"]
    with small_disk(folder / "disk") as mounted:
        kinds = draw.choices(["rank", "node", "stop", *(["disk"] if mounted else [])], k=kills)
        output = folder / "disk" / "run"
        try:
            cluster.start()
            (job,) = submit(cluster, file, folder / "unbroken", *overrides)
            assert "COMPLETED Restarts=0" in cluster.wait(job, 900), log_text(folder / "unbroken")
            (job,) = submit(cluster, file, output, *overrides, variables={"MRL_MAX_CRASHES": "10"})
            soak = Soak(cluster, output, job, draw, disk_seconds)
            recoveries = torment(soak, kinds, iterations)
            ended = cluster.wait(job, 300)
            assert "COMPLETED" in ended, log_text(output)[-5000:]
            assert_same_run(output, folder / "unbroken")
        finally:
            cluster.stop()
    report(recoveries, ended, seed)


def report(recoveries: list[tuple[str, float]], ended: str, seed: int) -> None:
    """Minimum, median and maximum of the recovery, for each kind of fault and for all."""
    print(f"{ended}; {len(recoveries)} faults, seed {seed}; equal to the unbroken run bit for bit")
    for kind in ["all", *sorted({kind for kind, _ in recoveries})]:
        found = [seconds for name, seconds in recoveries if kind in ("all", name)]
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"recovery {kind:5} {len(found):3}: {low:.0f} / {middle:.0f} / {high:.0f} s (min / median / max)")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Random faults over one run on a local SLURM.")
    parser.add_argument("--kills", type=int, default=20, help="faults")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: drawn and printed")
    parser.add_argument("--disk-seconds", type=float, default=60, help="how long the disk is full")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}, in {folder}", flush=True)
    run(chosen.kills, seed, chosen.disk_seconds, folder)
    if not chosen.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
