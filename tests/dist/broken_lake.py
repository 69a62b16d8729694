"""The frozen lake with environments that do not start."""

from __future__ import annotations

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.environments.frozen_lake import FrozenLakeTask

BROKEN_BLOCKS = 6


class BrokenLakeTask(FrozenLakeTask):
    """In the first blocks every other episode's environment fails to start: of each pair one is played."""

    def make_env(self, spec: EpisodeSpec):
        """A lake, or an error."""
        kind, *numbers = spec.trajectory_id.split("-")
        if kind == "train" and int(numbers[0]) < BROKEN_BLOCKS and int(numbers[1]) % 2 == 0:
            raise OSError("no container left")
        return super().make_env(spec)
