"""The trainer on real ranks: it resumes exactly, skips what has no decision, stops at the first-step check,
and shares verdicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.dist.pool import RankFailure, RankPool


def _config(path: Path, output: Path, **changes):
    from megatron_rl.config import parse_config

    settings = {
        "model": {"path": str(path), "dtype": "float32"},
        "output": str(output),
        "iterations": 3,
        "evaluate_every": 0,
        "evaluation_episodes": 4,
        "batching": {"token_budget": 512},
        "optimizer": {"lr": 1e-3},
        "critic_optimizer": {"lr": 1e-3},
        "algorithm": {
            "minibatches": 2,
            "importance": {"name": "sequence", "cap": 2.0},
            "anchor": {"name": "ewma", "decay": 0.5},
        },  # fmt: skip
        "rollout": {"episodes": 8, "max_turns": 3, "max_action_tokens": 2},
    }
    for name, value in changes.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) and name in settings else value
    return parse_config(settings)


LAKE = {"evaluation_maps": 4, "invalid_reward": -0.1, "step_reward": -0.02}
"""A lake on which an untrained policy earns something: advantages differ, so that weights and moments move."""


class _Watch:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def started(self, iterations: int, done: int) -> None: ...

    def metrics(self, iteration: int, values: dict[str, float]) -> None:
        self.rows.append({"iteration": iteration, **values})


def _loop(config):
    from megatron_rl.backend import topology
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.trainer import Trainer

    watch = _Watch()
    place = topology.initialize(config.parallel, seed=config.seed)
    return Trainer(config, place, make_task("frozen_lake", LAKE), watch), watch


def train(config) -> list[dict[str, float]]:
    """Metrics of every iteration without the clock's."""
    trainer, watch = _loop(config)
    trainer.run()
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "throughput/"))} for row in watch.rows]


def moved(before: Path, output: Path) -> dict[str, float]:
    """How far training moved each HF tensor of the policy that a run exported."""
    from safetensors.torch import load_file

    old, new = load_file(before / "model.safetensors"), load_file(output / "export/model.safetensors")
    assert old.keys() == new.keys()
    return {name: float((new[name].float() - weight.float()).abs().max()) for name, weight in old.items()}


def assert_moved(before: Path, output: Path) -> None:
    """Runs that train nothing are equal whatever a restart lost: every tensor has to be another one."""
    still = [name for name, distance in moved(before, output).items() if distance < 1e-5]
    assert still == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_checkpoint(path, lake_vocabulary(), TinyShape(hidden_size=32, num_layers=2, moe_hidden_size=16))
    return path


def test_a_resumed_run_is_the_unbroken_run(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    whole = ranks.run(train, 2, _config(tiny, tmp_path / "whole", parallel={"expert": 2}))[0]
    assert_moved(tiny, tmp_path / "whole")
    short = _config(tiny, tmp_path / "broken", parallel={"expert": 2}, iterations=2, checkpoint={"every": 1})
    ranks.run(train, 2, short)
    rest = ranks.run(train, 2, _config(tiny, tmp_path / "broken", parallel={"expert": 2}))[0]
    assert [row["iteration"] for row in rest] == [2]
    assert rest[0].keys() == whole[2].keys()
    different = {
        k: (rest[0][k], whole[2][k]) for k in rest[0] if not np.array_equal(rest[0][k], whole[2][k], equal_nan=True)
    }
    assert different == {}
    assert (tmp_path / "whole/export/model.safetensors").read_bytes() == (
        tmp_path / "broken/export/model.safetensors"
    ).read_bytes()


def skip_step(config) -> bool:
    """Whether a batch without decisions leaves weights, moments, counts and EWMA, and the next step moves."""
    import torch

    from megatron_rl.backend.anchor import main_weights
    from megatron_rl.training.rollout_sources.sync import record
    from megatron_rl.training.rollout_sources.validation import load_validated
    from megatron_rl.training.score import score_batch
    from megatron_rl.training.update import update_actor, update_critic

    trainer, _ = _loop(config)
    models = trainer.models
    directory = record(config, trainer.source.engine, trainer.task, 0, trainer.output / "rollouts")
    scored = score_batch(models, load_validated(config, directory, trainer.fingerprint, 0)[0])
    update_actor(models, scored, scored.rows)

    def state():
        moments = [t for part in models.actor.parts for s in part.optimizer.state.values() for t in s.values()]
        return [t.clone() for t in (*main_weights(models.actor), *models.anchor.average, *moments)], models.anchor.z

    before, z = state()
    nothing = update_actor(models, scored, np.empty(0, np.int64)), update_critic(models, scored, np.empty(0, np.int64))
    after, z_after = state()
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and z == z_after
    steps = models.actor.steps
    update_actor(models, scored, scored.rows)
    return same and nothing == ({"actor/skipped": 1.0}, {"critic/skipped": 1.0}) and models.actor.steps == steps + 1


def test_a_step_without_decisions_changes_nothing(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    assert ranks.run(skip_step, 2, _config(tiny, tmp_path / "skip")) == [True, True]


def count_passes(config) -> dict[str, tuple[int, int]]:
    """(how often micro-batches were prepared, passes over them) of one optimizer step of each model."""
    from megatron_rl.backend.replay import RouteRegistry
    from megatron_rl.training import forward
    from megatron_rl.training.rollout_sources.sync import record
    from megatron_rl.training.rollout_sources.validation import load_validated
    from megatron_rl.training.score import score_batch
    from megatron_rl.training.update import update_actor, update_critic

    trainer, _ = _loop(config)
    directory = record(config, trainer.source.engine, trainer.task, 0, trainer.output / "rollouts")
    scored = score_batch(trainer.models, load_validated(config, directory, trainer.fingerprint, 0)[0])
    counts, found = {"prepared": 0, "passes": 0}, {}

    def counted(name, function):
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "prepare_micro_batches", counted("prepared", forward.prepare_micro_batches))
        patch.setattr(RouteRegistry, "step", counted("passes", RouteRegistry.step))
        for name, update in (("actor", update_actor), ("critic", update_critic)):
            counts.update(prepared=0, passes=0)
            assert update(trainer.models, scored, scored.rows)[f"{name}/stepped"] == 1
            found[name] = (counts["prepared"], counts["passes"])
    return found


EVERY_PASS = {
    "policy": {"name": "st_ppo", "clipping_bias": "exact", "advantage": "mean"},
    "router_losses": {"aux_coef": 0.01},
}
"""Over an EWMA anchor: log-probs of the anchor, of the whole step, the norm of what clipping cuts, and the step."""


def test_an_optimizer_step_prepares_its_micro_batches_once(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    replayed = _config(tiny, tmp_path / "replayed", algorithm=EVERY_PASS)
    assert ranks.run(count_passes, 2, replayed) == 2 * [{"actor": (1, 4), "critic": (1, 1)}]
    native = _config(tiny, tmp_path / "native", algorithm=EVERY_PASS, replay={"enabled": False})
    # One pass more: without recorded routes the experts the policy chooses are counted in it.
    assert ranks.run(count_passes, 2, native) == 2 * [{"actor": (1, 5), "critic": (1, 1)}]


def check(config, tamper: str) -> str:
    """What the first-step check says of freshly sampled rollouts after one thing was changed."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.training.first_step_check import check_first_step
    from megatron_rl.training.rollout_sources.sync import record

    trainer, _ = _loop(config)
    if tamper == "temperature":
        trainer.source.engine.temperature = 2.0
    batch, _ = load_validated_as(
        config, record(config, trainer.source.engine, trainer.task, 0, trainer.output / "rollouts"), trainer, tamper
    )
    if tamper == "shift":
        batch = dataclasses.replace(batch, logprobs=np.roll(batch.logprobs, 1) * batch.action_mask)
    if tamper == "routes":
        rng = np.random.default_rng(0)
        batch = dataclasses.replace(batch, routes=tuple(r[:, rng.permutation(r.shape[1])] for r in batch.routes))
    try:
        check_first_step(trainer.models, batch)
    except ConfigError as error:
        return str(error)
    return "passed"


def load_validated_as(config, directory: Path, trainer, tamper: str):
    """Reads the batch as the trainer would; a header that lies about the temperature is past the entrance already."""
    from megatron_rl.rollouts.store import read_batch
    from megatron_rl.training.rollout_sources.validation import load_validated

    if tamper == "temperature":
        return read_batch(directory), None
    return load_validated(config, directory, trainer.fingerprint, 0)


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        ("nothing", "passed"),
        ("temperature", "temperature"),
        ("shift", "shifted against their tokens"),
        ("routes", "routes do not belong"),
    ],
)
def test_the_gate_names_the_cause(ranks: RankPool, tiny: Path, tmp_path: Path, tamper: str, says: str) -> None:
    bounds = {"max_k3": 1e-4, "max_extreme": 0.5}
    wide = {"episodes": 32, "max_turns": 6}
    config = _config(tiny, tmp_path / tamper, first_step_check=bounds, rollout=wide, batching={"token_budget": 2048})
    assert says in ranks.run(check, 1, config, tamper)[0]


def read_bad(config, version: int) -> int:
    from megatron_rl.training.rollout_sources.sync import record
    from megatron_rl.training.rollout_sources.validation import load_validated

    trainer, _ = _loop(config)
    directory = record(config, trainer.source.engine, trainer.task, 0, trainer.output / "rollouts")
    return len(load_validated(config, directory, trainer.fingerprint, version)[0])


def test_every_rank_raises_the_same_fault(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    assert ranks.run(read_bad, 2, _config(tiny, tmp_path / "good"), 0) == [8, 8]
    with pytest.raises(RankFailure) as caught:
        ranks.run(read_bad, 2, _config(tiny, tmp_path / "future"), -1)
    text = str(caught.value)
    assert text.count("RolloutError") >= 2 and "version" in text


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_phase_offload_changes_nothing_but_memory(ranks: RankPool, tiny: Path, tmp_path: Path, dtype: str) -> None:
    def settings(offload: bool):
        layout = {"expert": 2, "phase_offload": offload}
        output = tmp_path / f"{dtype}-{offload}"
        return _config(
            tiny, output, parallel=layout, model={"dtype": dtype}, iterations=2, first_step_check={"enabled": False}
        )

    kept, offloaded = (ranks.run(train, 2, settings(offload))[0] for offload in (False, True))
    assert_moved(tiny, tmp_path / f"{dtype}-True")
    assert [row.keys() for row in kept] == [row.keys() for row in offloaded]
    for before, after in zip(kept, offloaded, strict=True):
        assert {k for k in before if not np.array_equal(before[k], after[k], equal_nan=True)} == set()


def held(config) -> tuple[int, int, int]:
    """Gradient bytes of the critic while it is idle, at work, and idle again."""
    from megatron_rl.backend.offload import held_bytes

    trainer, _ = _loop(config)
    critic = trainer.models.critic
    idle = held_bytes(critic)
    with trainer.models.on_device("critic"):
        working = held_bytes(critic)
    return idle, working, held_bytes(critic)


def test_an_idle_model_holds_no_gradients(ranks: RankPool, tiny: Path, tmp_path: Path) -> None:
    idle, working, again = ranks.run(held, 1, _config(tiny, tmp_path / "held", parallel={"phase_offload": True}))[0]
    assert idle == again == 0 and working > 50_000
