"""Runs a command that ends with whoever started it, however that one ends. Run by path; standard library only.

The starter holds the other end of standard input and never writes: its end of file is the starter's end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10


def main() -> int:
    """Run `sys.argv[1:]` in this process group, which must be its own, and return its exit status as a shell does."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    # A request to end goes to the whole group; this process stays to report how the child took it.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    alone = threading.Event()
    threading.Thread(target=_end_with_starter, args=(child, alone), daemon=True).start()
    status = child.wait()
    if alone.is_set():
        # Nobody else is there to end what the child started.
        os.killpg(0, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_starter(child: subprocess.Popen[bytes], alone: threading.Event) -> None:
    # Not through sys.stdin: a thread that waits inside it keeps the interpreter from ending.
    os.read(0, 1)
    alone.set()
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
