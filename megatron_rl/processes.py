"""Which process something is of, and whether that process has ended.

A process number means something only where it was given out. `place` names that: host, its boot and its namespace of
process numbers (each container has its own). About processes of another place nothing is known here.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import xxhash


def place() -> str:
    """A short name of the host, its boot and the namespace that this process's number is of; empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(f"{socket.gethostname()} {boot} {namespace}".encode())


def start_time(number: int) -> str:
    """When a process of this place started, in kernel ticks since boot; empty: it is not there, has ended and awaits
    its parent, or is hidden. A process number is used again, the pair is not."""
    try:
        # The name, in brackets, may hold anything; state and start time are fields 3 and 22.
        fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def has_ended(where: str, number: int, started: str) -> bool | None:
    """Whether a process has ended; None: that cannot be told from here.

    Args:
        where: its `place`.
        number: its process number there.
        started: its `start_time`.
    """
    if not where or where != place() or not started:
        return None
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        # Another user's, and /proc may hide those.
        return None if not start_time(number) else start_time(number) != started
    return start_time(number) != started
