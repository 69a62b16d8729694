"""The frozen lake with episodes of very different length in time."""

from __future__ import annotations

import random
import time

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.environments.frozen_lake import FrozenLakeTask


class SlowLakeTask(FrozenLakeTask):
    """Every tenth episode or so sleeps for 0.6 s in each step, the others for 0.02 s."""

    def make_env(self, spec: EpisodeSpec):
        """A lake whose steps take time."""
        env = super().make_env(spec)
        seconds = 0.6 if random.Random(spec.trajectory_id).random() < 0.1 else 0.02
        step = env.step

        def slow_step(action):
            time.sleep(seconds)
            return step(action)

        env.step = slow_step
        return env
