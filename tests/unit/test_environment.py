"""The cached environment: finished or redone, shared safely, and never somebody else's folder."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import environment

PACKAGES = "packages"


def fill(path: Path, lock: Path) -> None:
    """Stands for venv and pip; fails if two run at once."""
    (path / PACKAGES).touch(exist_ok=False)
    time.sleep(0.2)
    (path / "bin").mkdir()
    (path / "bin" / "python").symlink_to(sys.executable)


def interrupted(path: Path, lock: Path) -> None:
    (path / "half").touch()
    raise KeyboardInterrupt


def install_in_process(lock: Path) -> None:
    environment.install(lock, fill)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MEGATRON_RL_VENV", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "lock.txt"
    path.write_text("a==1\n")
    return path


def test_finished_environment_is_kept(lock: Path) -> None:
    path = environment.install(lock, fill)
    assert path.parent.parent == Path(os.environ["XDG_CACHE_HOME"]) and environment.is_ready(path, lock)
    assert environment.install(lock, interrupted) == path


def test_interrupted_installation_is_redone(lock: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        environment.install(lock, interrupted)
    path = environment.install(lock, fill)
    assert environment.is_ready(path, lock) and not (path / "half").exists()


def test_another_lock_file_gets_another_folder(lock: Path) -> None:
    first = environment.install(lock, fill)
    lock.write_text("a==2\n")
    assert environment.folder(lock) != first


def test_chosen_folder_is_rebuilt_for_another_lock_file(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_VENV", str(tmp_path / "mine"))
    assert environment.install(lock, fill) == tmp_path / "mine"
    lock.write_text("a==2\n")
    assert not environment.is_ready(tmp_path / "mine", lock)
    assert environment.is_ready(environment.install(lock, fill), lock)


def test_vanished_interpreter_means_not_ready(lock: Path) -> None:
    path = environment.install(lock, fill)
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to(lock.parent / "gone")
    assert not environment.is_ready(path, lock)


def test_folder_of_somebody_else_is_refused(lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RL_VENV", str(tmp_path))
    with pytest.raises(SystemExit, match="MEGATRON_RL_VENV"):
        environment.install(lock, fill)
    assert lock.exists()


def test_two_at_once_install_once(lock: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=install_in_process, args=(lock,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert environment.is_ready(environment.folder(lock), lock)


def test_wrong_python_is_told(lock: Path) -> None:
    other = lock.rename(lock.with_name("lock-py27.txt"))
    with pytest.raises(SystemExit, match=r"Python 2\.7, found 3\.\d+ .*PYTHON"):
        environment.install(other, fill)


def test_every_runtime_dependency_is_locked() -> None:
    root = Path(__file__).resolve().parents[2]
    described = (root / "setup.py").read_text().split("RUNTIME = [")[1].split("]")[0]
    wanted = {line.strip(' ",\n').split(">=")[0].lower() for line in described.split("\n") if line.strip()}
    for lock in sorted((root / "requirements").glob("lock-*.txt")):
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line for line in lines)
        assert wanted <= {line.split("==")[0].lower() for line in lines}, lock.name


def test_lock_file_without_dependencies_installs_what_it_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **_: ran.append(command) or done)
    lock = tmp_path / "lock.txt"
    for text, bare in (("a==1\n", False), (f"{environment.NO_DEPS}\na==1\n", True)):
        lock.write_text(text)
        ran.clear()
        environment._fill(tmp_path / "venv", lock)
        assert ("--no-deps" in ran[1]) == bare and (len(ran) == 2) == bare, ran
