"""The loop: rollouts → score → update critic and actor → publish → log → evaluate → checkpoint.

It can be asked to stop at any time and goes on at the next optimizer step: rollouts that were not finished are played
again, those that were are read again, vectors that were scored are in the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_rl.backend.topology import Topology
from megatron_rl.config import RunConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.rollouts.schema import ModelFingerprint
from megatron_rl.run_dir.ledger import Entry, Ledger, reread
from megatron_rl.training import checkpoint
from megatron_rl.training.actor_critic import ActorCritic, build_actor_critic
from megatron_rl.training.epochs import means, train_epochs
from megatron_rl.training.first_step_check import check_first_step
from megatron_rl.training.partial_iteration import PartialIteration, read_partial_iteration
from megatron_rl.training.rollout_sources.base import IterationRollouts, RolloutSource, SourceContext
from megatron_rl.training.rollout_sources.factory import make_rollout_source
from megatron_rl.training.rollout_sources.validation import UNKNOWN_TOKENIZER
from megatron_rl.training.score import score_batch
from megatron_rl.training.stopping import Stopped, StopRequest
from megatron_rl.training.throughput import throughput_metrics
from megatron_rl.training.weights import write_hf

if TYPE_CHECKING:
    from megatron_rl.environments.base import Task


class TrainingObserver(Protocol):
    """Who looks on: progress bars, logs. Called on every rank with the same values."""

    def started(self, iterations: int, done: int) -> None:
        """Training begins; `done` of `iterations` are behind a run that was resumed."""
        ...

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        """An iteration is complete."""
        ...


class Trainer:
    """One run. `run` trains to the end; everything it needs to go on after a stop is in the checkpoint.

    Args:
        config: the resolved configuration.
        topology: groups of the layout, made already.
        task: what is played; None where recorded rollouts are trained on.
        watch: told of progress and metrics.
        stop: asked between optimizer steps; None: nobody asks.
    """

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        task: Task | None,
        watch: TrainingObserver,
        stop: StopRequest | None = None,
    ) -> None:
        self.config, self.topology, self.task, self.watch = config, topology, task, watch
        self.stop = stop or StopRequest()
        self.output = Path(config.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.models: ActorCritic = build_actor_critic(config, topology)
        self.ledger = Ledger(self.output, writes=topology.rank == 0)
        self._pause: PartialIteration | None = None
        cursor = self._resume() if config.checkpoint.resume else {}
        self.done: int = cursor.get("iteration", 0)
        self.models.release_all()
        self.source: RolloutSource = make_rollout_source(
            SourceContext(config, self.fingerprint, self.ledger, self.stop), task, self.models
        )
        self.source.restore(cursor.get("source", {}))
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Whose rollouts this run accepts."""
        hf = self.models.actor.model.hf
        tokenizer = UNKNOWN_TOKENIZER if self.task is None else self.task.vocabulary.fingerprint
        return ModelFingerprint(hf.model_type, hf.vocab_size, hf.num_experts, hf.topk, hf.moe_layers, tokenizer)

    def run(self) -> dict[str, float]:
        """Train the remaining iterations and export. Returns the last iteration's metrics.

        Raises:
            Stopped: on every rank; the run was asked to stop and has saved where it stands.
        """
        complete = False
        try:
            values = self._iterations()
            complete = True
        finally:
            self.source.close(complete=complete)
        write_hf(self.models.actor.model, self.output / "export", self.config.model.path)
        if self.models.critic is not None:
            write_hf(self.models.critic.model, self.output / "export-critic", self.config.model.path)
        return values

    def _iterations(self) -> dict[str, float]:
        values: dict[str, float] = {}
        self.watch.started(self.config.iterations, self.done)
        for iteration in range(self.done, self.config.iterations):
            try:
                found = self.iterate(iteration)
            except Stopped:
                self.save()
                raise
            if found is None:
                self.save()
                break
            values = found
            self.watch.metrics(iteration, values)
            self.done = iteration + 1
            if self._due(self.config.checkpoint.every, iteration):
                self.save()
        return values

    def iterate(self, iteration: int) -> dict[str, float] | None:
        """One iteration, or the rest of one that was stopped; returns its metrics, the same on every rank, or None
        where the source has ended.

        Raises:
            Stopped: see `run`.
        """
        self._seconds.clear()
        pause, self._pause = self._pause or self._begin(iteration), None
        if pause is None:
            return None
        steps, complete = train_epochs(
            self.models, pause.scored, iteration, self._timed, done=pause.steps, stop=self.stop.agreed
        )
        if not complete:
            self._pause = dataclasses.replace(pause, steps=steps)
            raise Stopped
        values = pause.values | means(steps)
        values |= self.models.controllers.observe(iteration, values)
        with self._timed("publish"):
            self.models.version += 1
            self.source.publish(self.models, pause.scored.batch)
        values |= throughput_metrics(self.config, self.models, pause.scored, dict(self._seconds))
        if self._due(self.config.evaluate_every, iteration):
            with self._timed("evaluate"):
                last = iteration + 1 == self.config.iterations
                values |= self.source.evaluate(self.config.evaluation_episodes, final=last)
        return values | {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}

    def save(self) -> None:
        """Checkpoint everything the next step depends on."""
        kept = self.config.checkpoint
        cursor = {"iteration": self.done, "source": self.source.state(), "ledger": self.ledger.state()}
        cursor["controllers"] = self.models.controllers.state()
        pause = None if self._pause is None else self._pause.to_bytes()
        with self.models.on_device("actor"), self.models.on_device("critic"):
            checkpoint.save_checkpoint(
                self.output / "checkpoints", self.done, self.models, cursor, kept.keep, keep_every=kept.keep_every,
                pause=pause,
            )  # fmt: skip

    def _begin(self, iteration: int) -> PartialIteration | None:
        """Rollouts and scores of an iteration, none of its steps."""
        with self._timed("rollout"):
            delivery = self._rollouts(iteration)
        if delivery is None:
            return None
        batch, values = delivery.batch, dict(delivery.metrics)
        if self.config.first_step_check.enabled and iteration == 0:
            values |= check_first_step(self.models, batch)
        with self._timed("score"):
            scored = score_batch(self.models, batch, monte_carlo=self.models.controllers.monte_carlo(iteration))
        return PartialIteration(scored, values | scored.metrics, [])

    def _rollouts(self, iteration: int) -> IterationRollouts | None:
        """What a lost run had trained this iteration on, else what the source has next."""
        planned = self.ledger.planned(iteration)
        version = self.models.version
        again = reread(planned, self.output) if planned else None
        delivery = self.source.next_rollouts(iteration, version) if again is None else self.source.replay(again)
        if delivery is not None:
            self.ledger.consume(Entry.of(iteration, version, delivery.batch, self.output))
        return delivery

    def _resume(self) -> dict:
        found = checkpoint.newest_complete(self.output / "checkpoints")
        if found.path is not None:
            cursor = checkpoint.load_checkpoint(found.path, self.models)
            self.ledger.restore(cursor["ledger"])
            self.models.controllers.restore(cursor["controllers"])
            file = found.path / checkpoint.PAUSE
            if file.exists():
                self._pause = read_partial_iteration(file, reread(self.ledger.last, self.output))
            return cursor
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
        if self.config.rollout.has_process:
            # Its rollouts are not played again: iterations that no checkpoint saw take the same ones once more.
            self.ledger.restore(Ledger(self.output, writes=False).state())
        return {}

    def _due(self, every: int, iteration: int) -> bool:
        last = iteration + 1 == self.config.iterations
        return last or (every > 0 and (iteration + 1) % every == 0)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
