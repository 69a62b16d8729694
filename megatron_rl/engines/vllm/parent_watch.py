"""Runs a command that ends when the process that started it ends, also when that is killed.

The parent holds the other end of standard input and never writes: end of file means that the parent has ended. Run by
path; standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10
"""Between SIGTERM and SIGKILL."""


def main() -> int:
    """Run `sys.argv[1:]` in this process group, which must be its own, and return its exit status as a shell does."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    # SIGTERM goes to the whole group; this process stays to return the child's status.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    orphaned = threading.Event()
    threading.Thread(target=_end_with_parent, args=(child, orphaned), daemon=True).start()
    status = child.wait()
    if orphaned.is_set():
        # No parent is left to end what the child started.
        os.killpg(0, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_parent(child: subprocess.Popen[bytes], orphaned: threading.Event) -> None:
    # Not through sys.stdin: a thread that waits inside it keeps the interpreter from ending.
    os.read(0, 1)
    orphaned.set()
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
