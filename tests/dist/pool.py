"""Living rank processes for tests.

Importing torch and Megatron takes seconds, so a fork server imports them once, rank processes are forked from it, and
they outlive a test. `RankPool.run` hands a module-level function to the first `world_size` of them and returns what
each rank returned.

Invariants:

* Every case has a process group of its own (gloo), with its own prefix in one key-value store that the test process
  hosts on a port the system chose. It is destroyed once all ranks are done.
* Every case starts from `torch.manual_seed(0)`, float32 as default dtype, and no Megatron state (`reset_megatron`).
* A case either returns one result per rank or raises `RankFailure` with a text for every rank, within its timeout plus
  a few seconds. The processes of a failed case are killed; the next case starts new ones.
* Ranks see no GPU, so that the same tests check the same thing everywhere.
* Rank processes end with the test process, however that one ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PLATFORM = "megatron_rl.backend.platform"
MAX_RANKS = 8
START_SECONDS = 300.0
GRACE_SECONDS = 5.0
"""How long the other ranks of a failed case may take to report their own tracebacks."""

Reply = tuple[bool, Any]
"""`(True, result)` or `(False, text of what went wrong)`."""


class RankFailure(Exception):
    """A rank raised, died or did not answer in time; the text has one section per rank."""


@dataclass(frozen=True)
class _Case:
    number: int
    rank: int
    world_size: int
    timeout: float
    call: bytes
    """Pickled `(func, args)`: unpickled inside the case, so that an import error there is the case's error."""


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: Path

    def reply(self) -> Reply:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(GRACE_SECONDS)
            return False, f"process died, exit code {self.process.exitcode}\n{self.stacks.read_text()}"

    def dump_stacks(self) -> str:
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


@dataclass
class RankPool:
    """Rank processes, started as needed and kept. Use as a context manager, or call `close`."""

    _workers: list[_Worker] = field(default_factory=list)
    _numbers: Iterable[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, func: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls `func(*args)` on every rank of a fresh gloo process group.

        Args:
            func: module-level function. It sees `torch.distributed` initialised and destroys nothing itself.
            world_size: 1 to 8.
            args: pickled once and given to every rank.
            timeout: seconds from the start of the case until its ranks are killed.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailure: with the traceback, exit code or stacks of every rank.
            ValueError: `world_size` out of range.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size: found {world_size}, expected 1 to {MAX_RANKS}")
        call = pickle.dumps((func, args))
        self._start(world_size - len(self._workers))
        workers = self._workers[:world_size]
        number = next(self._numbers)
        messages = [pickle.dumps(_Case(number, rank, world_size, timeout, call)) for rank in range(world_size)]
        return self._ask(workers, f"{func.__module__}.{func.__qualname__}", messages, timeout)

    def close(self) -> None:
        """Ends all rank processes."""
        self._kill(list(self._workers))
        self._folder.cleanup()

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "tests.dist.preload"])
        started = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name) / f"stacks-{next(self._numbers)}"
            # Not daemonic: Megatron's checkpoint writer starts processes of its own.
            process = context.Process(target=_serve, args=(theirs, self._store.port, str(stacks)), daemon=False)
            process.start()
            theirs.close()
            started.append(_Worker(process, ours, stacks))
        self._workers += started
        if started:
            self._ask(started, "start of rank processes", None, START_SECONDS)

    def _ask(self, workers: list[_Worker], name: str, messages: list[bytes] | None, timeout: float) -> list[Any]:
        try:
            for worker, message in zip(workers, messages or [], strict=messages is not None):
                worker.connection.send_bytes(message)
            replies = _collect(workers, timeout)
            if all(ok for ok, _ in replies.values()) and len(replies) == len(workers):
                return [replies[rank][1] for rank in range(len(workers))]
            failure = RankFailure(_describe(workers, name, replies, timeout))
        except BaseException:
            # Also when the test runner's own limit interrupts us: these ranks are in the middle of something.
            self._kill(workers)
            raise
        self._kill(workers)
        raise failure

    def _kill(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.kill()


def _collect(workers: list[_Worker], timeout: float) -> dict[int, Reply]:
    """Replies by rank; a rank is missing if it did not answer in time, or long after another one failed."""
    replies: dict[int, Reply] = {}
    deadline = time.monotonic() + timeout
    while len(replies) < len(workers) and (left := deadline - time.monotonic()) > 0:
        waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in replies}
        for connection in wait(list(waiting), left):
            rank = waiting[connection]
            replies[rank] = workers[rank].reply()
            if not replies[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return replies


def _describe(workers: list[_Worker], name: str, replies: Mapping[int, Reply], timeout: float) -> str:
    lines = [f"{name} failed on {len(workers)} ranks (limit {timeout:g} s)"]
    for rank, worker in enumerate(workers):
        ok, value = replies.get(rank, (False, None))
        if rank not in replies:
            value = f"no answer; what it was doing when it was killed:\n{worker.dump_stacks()}"
        lines.append(f"--- rank {rank}: {'finished' if ok else value}")
    return "\n".join(lines)


def _serve(connection: Connection, port: int, stacks_path: str) -> None:
    """Main function of a rank process."""
    with open(stacks_path, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        try:
            store = _prepare(port)
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            return
        connection.send_bytes(pickle.dumps((True, None)))
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(pickle.loads(message), store))


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _prepare(port: int) -> dist.Store:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prepare_for_megatron()
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def prepare_for_megatron() -> None:
    """Imports Megatron with everything a machine without a GPU needs; a second call does nothing."""
    # Ranks compute on the CPU also where there is a GPU: gloo needs it, and CUDA does not survive a fork.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    importlib.import_module(PLATFORM).install()


def _answer(case: _Case, store: dist.Store) -> bytes:
    own_store = dist.PrefixStore(f"case-{case.number}", store)
    try:
        return pickle.dumps((True, _run(case, own_store)))
    except BaseException:
        own_store.set("all left", "1")
        return pickle.dumps((False, traceback.format_exc()))


def _run(case: _Case, store: dist.Store) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    limit = timedelta(seconds=case.timeout)
    dist.init_process_group("gloo", store=store, rank=case.rank, world_size=case.world_size, timeout=limit)
    try:
        func, args = pickle.loads(case.call)
        result = func(*args)
        _leave_together(store, case.world_size, limit)
    finally:
        dist.destroy_process_group()
        reset_megatron()
        gc.collect()
    return result


def _leave_together(store: dist.Store, world_size: int, limit: timedelta) -> None:
    """Waits until every rank is done: closing our sockets breaks a rank that still connects to its peers.

    Not a gloo barrier, because a failed rank must be able to release the others (it sets the same key).
    """
    if store.add("left", 1) == world_size:
        store.set("all left", "1")
    store.wait(["all left"], limit)


def reset_megatron() -> None:
    """Forgets Megatron's module-level state: process groups, random trackers, routers, counters.

    Its own `destroy_model_parallel` is not used: it leaks gloo's threads and sockets. `destroy_process_group` on the
    default group has closed every group by then; what is left are references. Modules not imported are left alone.
    """
    core = "megatron.core."
    _forget(core + "parallel_state", r"_[A-Z_]+|_global_process_group_list")
    _forget(core + "tensor_parallel.random", r"_CUDA_RNG_STATE_TRACKER(_INITIALIZED)?")
    _forget(core + "num_microbatches_calculator", r"_GLOBAL_NUM_MICROBATCHES_CALCULATOR")
    _forget(core + "transformer.utils", r"_sequence_parallel_attr_cache")
    _forget(core + "transformer.moe.moe_utils", r"_MOE_LAYER_WISE_LOGGING_TRACKER")
    _forget(core + "transformer.moe.moe_logging", r"_MOE_METRICS_TRACKER")
    if moe_utils := sys.modules.get(core + "transformer.moe.moe_utils"):
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if router_replay := sys.modules.get(core + "transformer.moe.router_replay"):
        router_replay.RouterReplay.global_router_replay_instances.clear()


def _forget(module_name: str, pattern: str) -> None:
    """Gives the module's globals whose whole name matches their value at import: empty, False or None."""
    module = vars(sys.modules[module_name]) if module_name in sys.modules else {}
    for name, value in module.items():
        if re.fullmatch(pattern, name):
            module[name] = {} if isinstance(value, dict) else False if isinstance(value, bool) else None
