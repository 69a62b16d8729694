"""torchrun whose exit status is that of its ranks.

    srun python -m megatron_rl.launch.agent --nnodes 4 --nproc-per-node 8 … -m megatron_rl.cli train CONFIG

torchrun itself exits with 1 whatever its ranks said, so a batch script could not tell "stopped early, continue me" from
a crash; and it would die of the signal that asks ranks to stop, which SLURM sends to every process of a step.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun on these arguments.

    Returns:
        0, or the largest exit status of its ranks, 128 + signal for one that was killed. Once one rank has exited the
        agent sends SIGTERM to the others, so 128 + SIGTERM counts only if no rank has another status.
    """
    # A handler, not SIG_IGN: ranks would inherit the latter, and one that is still importing would miss the request.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        run.main(sys.argv[1:] if arguments is None else arguments)
    except ChildFailedError as error:
        statuses = {_status(failure.exitcode) for failure in error.failures.values()}
        return max(statuses - {128 + signal.SIGTERM} or statuses)
    return 0


def _status(exit_code: int) -> int:
    return exit_code if exit_code >= 0 else 128 - exit_code


if __name__ == "__main__":
    sys.exit(main())
