"""Imports flow one way.

A room of the package is a top-level module or folder. `ORDER` lists them; a room imports from itself and from rooms to
its left. Beyond that: rooms of a pair in `STRANGERS` do not know each other, `objectives` knows nothing but torch, the
standard library and `errors`, rooms in `TORCH_FREE` do without torch, and a library of `OWNERS` is imported by its
owners only. Modules do not import each other in a circle. Imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.house import PACKAGE, import_circles, imported_names

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "__init__",
    "errors",
    "processes",
    "files",
    "section",
    "rollouts",
    "objectives",
    "methods",
    "config",
    "batching",
    "hf",
    "reduce",
    "algorithm",
    "backend",
    "environments",
    "engines",
    "episodes",
    "run_dir",
    "rollout_worker",
    "training",
    "launch",
    "observe",
    "cli",
    "__main__",
)
STRANGERS = {
    frozenset({"rollouts", "objectives"}),
    frozenset({"training", "rollout_worker"}),
    frozenset({"algorithm", "backend"}),
}
OWNERS = {"megatron": {"backend"}, "vllm": {"engines"}}
TORCH_FREE = {"config", "errors", "section"}
OBJECTIVES_MAY_USE = {"torch", f"{PACKAGE}.errors", f"{PACKAGE}.objectives"}


def fault(room: str, name: str) -> str | None:
    """Why `room` must not import `name`, or None if it may."""
    library, *rest = name.split(".")
    if room == "objectives" and not may_objectives_use(name):
        return "objectives knows torch, the standard library and errors only"
    if room in TORCH_FREE and library == "torch":
        return f"{room} does without torch"
    if room not in OWNERS.get(library, {room}):
        return f"only {', '.join(sorted(OWNERS[library]))} imports {library}"
    if library != PACKAGE:
        return None
    other = rest[0] if rest and rest[0] in ORDER else "__init__"
    if frozenset({room, other}) in STRANGERS:
        return f"{room} and {other} do not know each other"
    return f"{other} lies to the right of {room}" if ORDER.index(other) > ORDER.index(room) else None


def may_objectives_use(name: str) -> bool:
    """Whether `name` is allowed in `objectives`."""
    allowed = any(name == prefix or name.startswith(prefix + ".") for prefix in OBJECTIVES_MAY_USE)
    return allowed or name.split(".")[0] in sys.stdlib_module_names


def violations(root: Path) -> list[str]:
    """One line per import that breaks the rules in `root/megatron_rl`, and per room missing from ORDER."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        room = path.relative_to(root / PACKAGE).parts[0].removesuffix(".py")
        if room not in ORDER:
            found.append(f"{path.relative_to(root)}: room {room} is not in ORDER")
            continue
        for line, name in imported_names(path, root):
            if reason := fault(room, name):
                found.append(f"{path.relative_to(root)}:{line}: imports {name}: {reason}")
    return found


def test_imports_flow_one_way() -> None:
    assert violations(ROOT) == []


def test_no_modules_import_each_other() -> None:
    assert import_circles(ROOT) == []


@pytest.mark.parametrize(
    "back",
    [
        "from megatron_rl.training import epochs",
        "def f():\n    import megatron_rl.training.epochs",
        "if TYPE_CHECKING:\n    from .epochs import Step",
        "from megatron_rl.training import update",
    ],
)
def test_circle_is_seen(tmp_path: Path, back: str) -> None:
    planted(tmp_path, "training/epochs.py", "from megatron_rl.training.update import step")
    planted(tmp_path, "training/update.py", "from .score import score")
    planted(tmp_path, "training/score.py", back)
    involved = {"training.score", "training.update"} | ({"training.epochs"} if "epochs" in back else set())
    assert [set(circle) for circle in import_circles(tmp_path)] == [involved]


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / PACKAGE).rglob("*.py")}
    missing = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert missing == [], "without __init__.py setup.py leaves them out of an installation"


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("training/trainer.py", "from megatron.core import parallel_state", "only backend"),
        ("algorithm/losses.py", "from megatron_rl.backend.model import Model", "do not know each other"),
        ("algorithm/losses.py", "def f():\n    from megatron_rl.training import score", "right of algorithm"),
        ("training/trainer.py", "from megatron_rl.rollout_worker import worker", "do not know each other"),
        ("hf/convert.py", "def f():\n    import megatron.core", "only backend"),
        ("backend/step.py", "import vllm", "only engines"),
        ("rollouts/store.py", "from megatron_rl.objectives.policy import loss", "do not know each other"),
        ("objectives/policy.py", "import numpy", "torch, the standard library"),
        ("objectives/policy.py", "from megatron_rl import config", "torch, the standard library"),
        ("config.py", "import torch", "without torch"),
        ("backend/model.py", "from ..training import loop", "right of backend"),
        ("reduce.py", "from megatron_rl.backend import topology", "right of reduce"),
        ("errors.py", "from . import config", "right of errors"),
        ("utils/text.py", "", "not in ORDER"),
        ("launch/plan.py", "if TYPE_CHECKING:\n    from megatron_rl.cli import main", "right of launch"),
    ],
)
def test_breach_is_seen(tmp_path: Path, file: str, source: str, reason: str) -> None:
    assert [line for line in violations(planted(tmp_path, file, source)) if reason in line]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("backend/model.py", "from megatron.core import parallel_state"),
        ("training/trainer.py", "from ..backend import step\nfrom .score import score\nimport numpy, torch"),
        ("objectives/policy.py", "import math\nimport torch.nn.functional\nfrom megatron_rl.errors import ConfigError"),
        ("objectives/policy.py", "from .value import loss"),
        ("batching/packing.py", "from megatron_rl.rollouts.schema import RolloutBatch"),
        ("cli.py", "import megatron_rl\nfrom megatron_rl import observe"),
    ],
)
def test_allowed_import_is_allowed(tmp_path: Path, file: str, source: str) -> None:
    assert violations(planted(tmp_path, file, source)) == []


def planted(root: Path, file: str, source: str) -> Path:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root
