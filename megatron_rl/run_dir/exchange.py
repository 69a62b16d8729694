"""Messages between trainer and rollout process: files in the run directory, and nothing else.

    exchange/progress.json                trainer → rollout: weight version, trajectories taken, whether the run is over
    exchange/heartbeat.json               rollout → trainer: that it is alive, its state, its counts, its last problem
    exchange/evaluation-000010.json       rollout → trainer: greedy success of a weight version
    weights/version-000010/               trainer → rollout: HF directory
    weights/version-000010.rejected.json  rollout → trainer: an engine refused it, and why
    rollouts/stream/00000/*.arrow         rollout → trainer: finished trajectories

Every file and directory appears whole (written under another name, then renamed). Either side may be absent, late, or
start again: each reads the newest state and acts on it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.files import write_text

STATES = ("starting", "playing", "waiting", "asleep", "finished", "failed")
_VERSION = re.compile(r"version-(\d{6,})")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Progress:
    """Written by the trainer after each publication, read by the rollout process."""

    version: int
    """Newest weight version: iterations completed."""
    taken: int
    """Trajectories that completed iterations trained on or dropped; as many new ones may begin."""
    done: bool = False
    """The run is over: the rollout process ends."""


@dataclass(frozen=True)
class Heartbeat:
    """Written by the rollout process about once a second. A change means that it is alive: clocks may differ."""

    beat: int
    """Differs in every heartbeat: nanoseconds of the writer's clock."""
    state: str
    """One of STATES; `finished`: no trajectory will follow; `failed`: the process has ended with `problem`."""
    version: int
    """Weight version its engine serves; -1: none yet."""
    recorded: int
    """Trajectories on disk."""
    problem: str = ""
    """Text of the last error, while it lasts; empty: none."""
    in_flight: int = -1
    """Episodes that were begun and are not on disk; -1: not known."""
    level: int = -1
    """Curriculum level of episodes that begin now; -1: not known, or no curriculum."""
    success: float | None = None
    """Success rate over the curriculum's window; None: not known."""
    awake_bytes: int = 0
    """Engine memory before it last slept (`engines.vllm.replica.Footprint`); 0: it never slept, or not measured."""
    asleep_bytes: int = 0
    """Engine memory while it last slept; 0: as above."""


@dataclass(frozen=True)
class Exchange:
    """Reads and writes the messages of a run directory."""

    output: Path
    """The run directory."""

    @property
    def stream(self) -> Path:
        """Directory of the directories of shards, which are in the order of their names."""
        return self.output / "rollouts" / "stream"

    @property
    def weights(self) -> Path:
        """Directory of the published versions."""
        return self.output / "weights"

    def write_progress(self, progress: Progress) -> None:
        """Replace the trainer's progress, durably."""
        self._write("progress.json", asdict(progress))

    def progress(self) -> Progress | None:
        """The trainer's progress; None: it has not begun."""
        return _read(Progress, self._folder / "progress.json")

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Replace the heartbeat. On a full disk only the modification time of the old one changes."""
        try:
            self._write("heartbeat.json", asdict(heartbeat))
        except OSError:
            if (self._folder / "heartbeat.json").exists():
                os.utime(self._folder / "heartbeat.json")

    def heartbeat(self) -> tuple[Heartbeat | None, float]:
        """The newest heartbeat and its file's modification time, of which only changes count; None and 0: no file."""
        path = self._folder / "heartbeat.json"
        try:
            changed = path.stat().st_mtime
        except OSError:
            return None, 0.0
        return _read(Heartbeat, path), changed

    def forget_heartbeat(self) -> None:
        """Remove the heartbeat, before a new rollout process starts: the last one is of the process before."""
        (self._folder / "heartbeat.json").unlink(missing_ok=True)

    def write_evaluation(self, version: int, success: float) -> None:
        """Write the greedy success rate of a version."""
        self._write(f"evaluation-{version:06d}.json", {"version": version, "success": success})

    def evaluations(self) -> dict[int, float]:
        """Version → greedy success rate, of all versions that were evaluated."""
        found = (_read_json(path) for path in sorted(self._folder.glob("evaluation-*.json")))
        return {entry["version"]: entry["success"] for entry in found if entry is not None}

    def published(self) -> dict[int, Path]:
        """Version → directory, of all versions that were published and not pruned."""
        found = ((_VERSION.fullmatch(path.name), path) for path in self.weights.glob("version-*"))
        return {int(name[1]): path for name, path in found if name and path.is_dir()}

    def reject(self, version: int, reason: str) -> None:
        """Write that an engine refused a version."""
        write_text(_rejection(self.weights, version), json.dumps({"version": version, "reason": reason}))

    def rejection(self, version: int) -> str | None:
        """Why an engine refused a version; None: it has not."""
        found = _read_json(_rejection(self.weights, version))
        return None if found is None else str(found["reason"])

    def forget_rejection(self, version: int) -> None:
        """Remove a version's refusal, before the version is published again."""
        _rejection(self.weights, version).unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return self.output / "exchange"

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / name, json.dumps(content))


def _rejection(weights: Path, version: int) -> Path:
    return weights / f"version-{version:06d}.rejected.json"


def _read(kind: type[_T], path: Path) -> _T | None:
    found = _read_json(path)
    return None if found is None else kind(**found)


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no file; a network file system may also show a replaced one as unreadable for a moment."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
