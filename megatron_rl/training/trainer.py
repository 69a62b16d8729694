"""The training loop, and who does what in it.

    actor_critic       models with their optimizers, the anchor and the reference, on this rank
    rollout_sources    the rollouts of an iteration: played here, streamed from a rollout worker, or recorded before
    first_step_check   stops a run whose trainer does not recognise what the engine sampled
    score              values, log-probs of anchor and reference, advantages, returns
    health             stops a run that does not learn: failing episodes, steps that change nothing
    epochs, update     the optimizer steps of critic and actor
    controllers        what the run steers by itself: KL coefficient, end of the critic's warm-up
    weights            new weights for the engines; the export of a finished run
    ledger             which trajectories each iteration was trained on, written before its first step
    checkpoint         everything the next step depends on
    partial_iteration  the rest of an iteration that was stopped between two of its optimizer steps
    stopping           a request to stop, on which all ranks agree

A run can be asked to stop at any time and goes on at the next optimizer step: episodes that were not finished are
played again, recorded ones are read again, scores are in the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.backend.topology import Topology
from megatron_rl.config import RunConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch
from megatron_rl.run_dir.ledger import Entry, Ledger, reread
from megatron_rl.training import checkpoint
from megatron_rl.training.actor_critic import ActorCritic, build_actor_critic
from megatron_rl.training.epochs import means, train_epochs
from megatron_rl.training.first_step_check import check_first_step
from megatron_rl.training.health import SkippedSteps, check_episodes
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
    """Receives progress and metrics, for progress bars and logs. Called on every rank with the same values."""

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
        watch: called with progress and metrics.
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
        self.skipped = SkippedSteps(config.algorithm.max_skipped_steps)
        self._partial: PartialIteration | None = None
        """An iteration that was stopped in its middle, to be continued; None: there is none."""
        cursor = self._resume() if config.checkpoint.resume else {}
        self.done: int = cursor.get("iteration", 0)
        """Completed iterations."""
        self.models.release_all()
        self.source: RolloutSource = make_rollout_source(
            SourceContext(config, self.fingerprint, self.ledger, self.stop), task, self.models
        )
        self.source.restore(cursor.get("source", {}))
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Whose rollouts this run accepts."""
        tokenizer = UNKNOWN_TOKENIZER if self.task is None else self.task.vocabulary.fingerprint
        return ModelFingerprint.of(self.models.actor.model.hf, tokenizer)

    def run(self) -> dict[str, float]:
        """Train the remaining iterations and export. Returns the last iteration's metrics.

        Raises:
            Stopped: on every rank; the run was asked to stop and has saved where it stands.
        """
        metrics: dict[str, float] = {}
        complete = False
        try:
            self.watch.started(self.config.iterations, self.done)
            for iteration in range(self.done, self.config.iterations):
                latest = self.iterate(iteration)
                if latest is None:
                    self.save()
                    break
                metrics = latest
            complete = True
        except Stopped:
            self.save()
            raise
        finally:
            self.source.close(complete=complete)
        self.skipped.require_one("actor", self.models.actor.steps)
        self.export()
        return metrics

    def iterate(self, iteration: int) -> dict[str, float] | None:
        """Generate → score → update → publish → evaluate → checkpoint; or the rest of it, after a stop in its middle.

        Returns:
            Metrics, the same on every rank; None where the source has no more rollouts.

        Raises:
            Stopped: see `run`; nothing is saved yet.
        """
        self._seconds.clear()
        partial, self._partial = self._partial, None
        if partial is None:
            rollouts = self.generate(iteration)
            if rollouts is None:
                return None
            partial = self.score(iteration, rollouts)
        metrics = self.update(iteration, partial)
        self.publish(partial.scored.batch)
        metrics |= throughput_metrics(self.config, self.models, partial.scored, dict(self._seconds))
        if self._due(self.config.evaluate_every, iteration):
            metrics |= self.evaluate(iteration)
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        self.watch.metrics(iteration, metrics)
        self.done = iteration + 1
        if self._due(self.config.checkpoint.every, iteration):
            self.save()
        return metrics

    def generate(self, iteration: int) -> IterationRollouts | None:
        """What a lost run trained this iteration on, else what the source has next; None: it has ended."""
        with self._timed("rollout"):
            version, planned = self.models.version, self.ledger.planned(iteration)
            rollouts = (
                self.source.next_rollouts(iteration, version)
                if planned is None
                else self.source.replay(reread(planned, self.output))
            )
            if rollouts is not None:
                self.ledger.consume(Entry.of(iteration, version, rollouts.batch, self.output))
        return rollouts

    def score(self, iteration: int, rollouts: IterationRollouts) -> PartialIteration:
        """The iteration with its scores and none of its steps."""
        batch, metrics = rollouts.batch, dict(rollouts.metrics)
        metrics |= check_episodes(batch, rollouts.not_started, self.config.rollout.max_failed)
        if self.config.first_step_check.enabled and iteration == 0:
            metrics |= check_first_step(self.models, batch)
        with self._timed("score"):
            scored = score_batch(self.models, batch, monte_carlo=self.models.controllers.monte_carlo(iteration))
        return PartialIteration(scored, metrics | scored.metrics, [])

    def update(self, iteration: int, partial: PartialIteration) -> dict[str, float]:
        """The steps that are left, the critic's before the actor's. Returns the iteration's metrics so far.

        Raises:
            Stopped: between two steps; what is done is kept for `save`.
        """
        steps, complete = train_epochs(
            self.models, partial.scored, iteration, self._timed, done=partial.steps, stop=self.stop.agreed
        )
        self.skipped.observe(steps[len(partial.steps) :])
        if not complete:
            self._partial = dataclasses.replace(partial, steps=steps)
            raise Stopped
        metrics = partial.metrics | means(steps)
        return metrics | self.models.controllers.observe(iteration, metrics)

    def publish(self, batch: RolloutBatch) -> None:
        """Give the engines the new weights; a canary is scored on `batch`, which they were trained on."""
        with self._timed("publish"):
            self.models.version += 1
            self.source.publish(self.models, batch)

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Greedy success on held-out episodes; see `RolloutSource.evaluate`."""
        with self._timed("evaluate"):
            last = iteration + 1 == self.config.iterations
            return dict(self.source.evaluate(self.config.evaluation_episodes, final=last))

    def save(self) -> None:
        """Checkpoint everything the next step depends on. Collective."""
        kept = self.config.checkpoint
        cursor = {"iteration": self.done, "source": self.source.state(), "ledger": self.ledger.state()}
        cursor["controllers"] = self.models.controllers.state()
        partial = None if self._partial is None else self._partial.to_bytes()
        with self.models.on_device("actor"), self.models.on_device("critic"):
            checkpoint.save_checkpoint(
                self.output / "checkpoints", self.done, self.models, cursor, kept.keep, keep_every=kept.keep_every,
                partial_iteration=partial,
            )  # fmt: skip

    def export(self) -> None:
        """Write the trained weights as HF checkpoints. Collective."""
        write_hf(self.models.actor.model, self.output / "export", self.config.model.path)
        if self.models.critic is not None:
            write_hf(self.models.critic.model, self.output / "export-critic", self.config.model.path)

    def _resume(self) -> dict[str, Any]:
        """Load the newest complete checkpoint and return its cursor; nothing where there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, and none is complete.
        """
        newest = checkpoint.newest_complete(self.output / "checkpoints")
        if newest.path is not None:
            return self._load(newest.path)
        damaged = [(path, reason) for path, reason in newest.skipped if not path.name.startswith(".")]
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

    def _load(self, path: Path) -> dict[str, Any]:
        cursor = checkpoint.load_checkpoint(path, self.models)
        self.ledger.restore(cursor["ledger"])
        self.models.controllers.restore(cursor["controllers"])
        file = path / checkpoint.PARTIAL_ITERATION
        if file.exists():
            assert self.ledger.last is not None, "an iteration is in the ledger before it is scored"
            self._partial = read_partial_iteration(file, reread(self.ledger.last, self.output))
        return cursor

    def _due(self, every: int, iteration: int) -> bool:
        last = iteration + 1 == self.config.iterations
        return last or (every > 0 and (iteration + 1) % every == 0)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
