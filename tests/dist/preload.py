"""What every rank process has imported when it starts: the fork server imports this module once and forks from there.

Errors are left to the rank processes, which prepare themselves again and can tell: an exception here would only end the
fork server.
"""

from __future__ import annotations

import contextlib

import torch

import tests.dist.pool

torch.set_num_threads(1)
with contextlib.suppress(Exception):
    tests.dist.pool.prepare_for_megatron()
