"""`megatron-rl convert` for launchers that start a file: one process, torchrun, srun or mpirun.

python tools/convert_hf.py SOURCE TARGET
torchrun --nproc_per_node 4 tools/convert_hf.py SOURCE TARGET --verify
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.cli import main  # noqa: E402  (found beside this file, installed or not)

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()
