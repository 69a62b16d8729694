"""What a server with a copy that goes wrong unnoticed runs in its workers."""

from __future__ import annotations

from megatron_rl.engines.vllm.worker import WorkerExtension


class SpoiledCopy(WorkerExtension):
    """The second engine copy says that it loaded the directory `spoiled`, and did not."""

    def load_directory(self, path: str) -> float:
        """See `WorkerExtension`."""
        return 0.0 if self._copy == 1 and path.endswith("spoiled") else super().load_directory(path)
