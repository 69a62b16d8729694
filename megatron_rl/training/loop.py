"""The loop: play → validate → score → update critic and actor → publish → log → evaluate → checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch.distributed as dist

from megatron_rl.backend import platform
from megatron_rl.backend.topology import Topology
from megatron_rl.batching import split_minibatches
from megatron_rl.config import RunConfig
from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tasks import Task
from megatron_rl.errors import CheckpointError
from megatron_rl.rollouts.schema import ModelFingerprint
from megatron_rl.training import checkpoint
from megatron_rl.training.agents import Agents, build_agents
from megatron_rl.training.gate import check_first_step
from megatron_rl.training.publish import publish, write_hf
from megatron_rl.training.records import ScoredBatch
from megatron_rl.training.rollout import evaluate, load_validated, record
from megatron_rl.training.score import score_batch
from megatron_rl.training.throughput import throughput_metrics
from megatron_rl.training.update import update_actor, update_critic


class Watch(Protocol):
    """Who looks on: progress bars, logs. Called on every rank with the same values."""

    def started(self, iterations: int, done: int) -> None: ...
    def metrics(self, iteration: int, values: dict[str, float]) -> None: ...


class Loop:
    """One run. `run` trains to the end; everything it needs to go on after a stop is in the checkpoint.

    Args:
        config: the resolved configuration.
        topology: groups of the layout, made already.
        task: what is played.
        watch: told of progress and metrics.
    """

    def __init__(self, config: RunConfig, topology: Topology, task: Task, watch: Watch) -> None:
        self.config, self.topology, self.task, self.watch = config, topology, task, watch
        self.output = Path(config.output)
        self.agents: Agents = build_agents(config, topology)
        self.done = self._resume() if config.checkpoint.resume else 0
        self.agents.release_all()
        weights = publish(self.agents.actor.model, self.output / "weights", config.model.path, self.agents.version)
        dtype = platform.dtype(config.rollout.engine_dtype or config.model.dtype)
        self.engine = LocalEngine(
            weights, dtype=dtype, temperature=config.rollout.temperature, version=self.agents.version,
            device=platform.device(),
        )  # fmt: skip
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Whose rollouts this run accepts."""
        hf = self.agents.actor.model.hf
        return ModelFingerprint(
            hf.model_type, hf.vocab_size, hf.num_experts, hf.topk, hf.moe_layers, self.task.vocabulary.fingerprint
        )

    def run(self) -> dict[str, float]:
        """Train the remaining iterations and export. Returns the last iteration's metrics."""
        values: dict[str, float] = {}
        self.watch.started(self.config.iterations, self.done)
        for iteration in range(self.done, self.config.iterations):
            values = self.iterate(iteration)
            self.watch.metrics(iteration, values)
            self.done = iteration + 1
            if self._due(self.config.checkpoint.every, iteration):
                self.save()
        write_hf(self.agents.actor.model, self.output / "export", self.config.model.path)
        write_hf(self.agents.critic.model, self.output / "export-critic", self.config.model.path)
        return values

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics, the same on every rank."""
        self._seconds.clear()
        self.engine.reseed(
            int(np.random.SeedSequence([self.config.seed, iteration, dist.get_rank()]).generate_state(1)[0])
        )
        with self._timed("rollout"):
            directory = record(self.config, self.engine, self.task, iteration, self.output / "rollouts")
        batch, _ = load_validated(self.config, directory, self.fingerprint, self.agents.version)
        values = check_first_step(self.agents, batch) if self.config.gate.enabled and iteration == 0 else {}
        with self._timed("score"):
            scored = score_batch(self.agents, batch)
        values |= scored.metrics | self._update(scored, iteration)
        with self._timed("publish"):
            self._publish()
        values |= throughput_metrics(self.config, self.agents, scored, dict(self._seconds))
        if self._due(self.config.evaluate_every, iteration):
            with self._timed("evaluate"):
                episodes = self.config.evaluation_episodes
                values["evaluation/success"] = evaluate(self.config, self.engine, self.task, episodes)
        return values | {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}

    def save(self) -> None:
        """Checkpoint everything the next iteration depends on."""
        root = self.output / "checkpoints"
        cursor = {"iteration": self.done}
        with self.agents.at_work("actor"), self.agents.at_work("critic"):
            checkpoint.save_checkpoint(root, self.done, self.agents, cursor, keep=self.config.checkpoint.keep)

    def _resume(self) -> int:
        found = checkpoint.newest_complete(self.output / "checkpoints")
        if found.path is None:
            damaged = [(path, reason) for path, reason in found.skipped if not path.name.startswith(".")]
            if damaged:
                path, reason = damaged[0]
                raise CheckpointError(
                    "no complete checkpoint is left to continue from",
                    file=path,
                    found=reason,
                    expected="a whole checkpoint",
                    setting="checkpoint.resume=false, or another output directory, to start afresh",
                )
            return 0
        return checkpoint.load_checkpoint(found.path, self.agents)["iteration"]

    def _update(self, scored: ScoredBatch, iteration: int) -> dict[str, float]:
        algorithm = self.config.algorithm
        rounds = [("critic", update_critic, algorithm.critic_epochs)]
        if iteration >= algorithm.critic_warmup:
            rounds.append(("actor", update_actor, algorithm.actor_epochs))
        steps: list[dict[str, float]] = []
        for name, update, epochs in rounds:
            with self._timed(name), self.agents.at_work(name):
                for epoch in range(epochs):
                    steps += [update(self.agents, scored, rows) for rows in self._minibatches(scored, iteration, epoch)]
        return _means(steps)

    def _minibatches(self, scored: ScoredBatch, iteration: int, epoch: int) -> list[np.ndarray]:
        keys = [scored.batch.trajectory_ids[row] for row in scored.rows]
        seed = self.config.seed + iteration
        return [
            scored.rows[part]
            for part in split_minibatches(len(keys), self.config.algorithm.minibatches, seed, epoch, keys)
        ]

    def _publish(self) -> None:
        self.agents.version += 1
        weights = publish(self.agents.actor.model, self.output / "weights", self.config.model.path, self.agents.version)
        self.engine.load(weights, self.agents.version)

    def _due(self, every: int, iteration: int) -> bool:
        last = iteration + 1 == self.config.iterations
        return last or (every > 0 and (iteration + 1) % every == 0)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the optimizer steps that reported it."""
    names = {name for step in steps for name in step}
    found = {name: [step[name] for step in steps if name in step] for name in sorted(names)}
    return {name: float(np.mean(values)) for name, values in found.items()}
