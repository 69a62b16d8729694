"""Every recipe runs on real ranks: parameters move, metrics are finite, and a method without critic builds none."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import load_config
from tests.dist.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples/recipes").glob("*.yaml"))
BASE = """
iterations: 2
evaluate_every: 0
evaluation_episodes: 2
model: {dtype: float32}
parallel: {expert: 2}
batching: {token_budget: 512}
optimizer: {lr: 1.0e-3}
critic_optimizer: {lr: 1.0e-3}
algorithm: {minibatches: 2, entropy_coef: 0.01}
rollout:
  environment: tests.dist.graded:GradedLake
  episodes: 8
  max_turns: 3
  max_action_tokens: 2
  environment_options: {maps_per_prompt: 4, evaluation_maps: 4}
first_step_check: {enabled: false}
"""
SMALL = {
    "vapo": ["algorithm.value.warmup.iterations=1"],
    "vc_ppo": ["algorithm.value.warmup.iterations=1"],
}
"""Two iterations leave room for a short warm-up only."""
SLOW = ("cispo", "evpo", "gmpo", "grpo", "gspo", "ppo", "rloo", "vc_ppo")
"""Run by `make test-full`: another recipe of the default run takes the same path."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    folder = tmp_path_factory.mktemp("recipes")
    shape = TinyShape(hidden_size=32, num_layers=2, moe_hidden_size=16)
    write_tiny_checkpoint(folder / "tiny", lake_vocabulary(), shape)
    text = BASE.replace("model: {dtype: float32}", f"model: {{path: {folder / 'tiny'}, dtype: float32}}")
    (folder / "base.yaml").write_text(text)
    return folder / "base.yaml"


def configured(base: Path, recipe: str, output: Path, *changes: str):
    from megatron_rl.config import load_config

    recipe_file = str(ROOT / f"examples/recipes/{recipe}.yaml")
    return load_config(base, [recipe_file, f"output={output}", *SMALL.get(recipe, []), *changes])


def make_loop(config):
    from megatron_rl.backend import topology
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.training.trainer import Trainer
    from tests.dist.test_training import _Watch

    watch = _Watch()
    place = topology.initialize(config.parallel, seed=config.seed)
    return Trainer(
        config, place, make_task(config.rollout.environment, config.rollout.environment_options), watch
    ), watch


def run_recipe(config) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Metrics of every iteration, and how far the weights of each model moved."""
    from megatron_rl.backend.anchor import main_weights

    trainer, watch = make_loop(config)
    models = trainer.models
    live = {"actor": models.actor} | ({} if models.critic is None else {"critic": models.critic})
    before = {name: [w.detach().clone() for w in main_weights(model)] for name, model in live.items()}
    trainer.run()
    moved = {
        name: max(float((a - b).abs().max()) for a, b in zip(before[name], main_weights(model), strict=True))
        for name, model in live.items()
    }
    return watch.rows, moved


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=[pytest.mark.full] if r in SLOW else []) for r in RECIPES if r != "vpo"]
)
def test_recipe(ranks: RankPool, base: Path, tmp_path: Path, recipe: str) -> None:
    config = configured(base, recipe, tmp_path / "run")
    rows, moved = ranks.run(run_recipe, 2, config)[0]
    assert len(rows) == 2 and set(moved) == ({"actor", "critic"} if config.algorithm.needs_critic else {"actor"})
    assert all(1e-5 < distance < 0.1 for distance in moved.values()), moved
    bad = {k: v for row in rows for k, v in row.items() if not math.isfinite(v)}
    assert bad == {}
    assert rows[-1]["actor/stepped"] == 1 and rows[-1]["actor/grad_norm"] > 0
    assert (tmp_path / "run/export-critic").exists() == config.algorithm.needs_critic


def test_methods_from_outside_train(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    """A loss and an estimator that live in a test file, named in the configuration; the package knows neither."""
    mine = "tests.unit.methods_of_my_own"
    changes = [f"algorithm.policy={mine}:TurnSquared", f"algorithm.estimator={mine}:GroupMedian", f"output={tmp_path}"]
    config = load_config(base, [*changes, "algorithm.policy.strength=0.1", "algorithm.anchor=recompute"])
    rows, moved = ranks.run(run_recipe, 2, config)[0]
    assert set(moved) == {"actor"} and moved["actor"] > 1e-5
    assert len(rows) == 2 and rows[-1]["actor/stepped"] == 1 and all(math.isfinite(v) for v in rows[-1].values())


def run_vpo(config) -> tuple[dict[str, float], bool]:
    """Two iterations on shards whose trajectories carry reward vectors."""
    import torch.distributed as dist

    from megatron_rl.rollouts.store import write_shard
    from megatron_rl.training.epochs import means, train_epochs
    from megatron_rl.training.rollout_sources.sync import my_share, play
    from megatron_rl.training.rollout_sources.validation import load_validated
    from megatron_rl.training.score import score_batch

    trainer, _ = make_loop(config)
    engine, task, values = trainer.source.engine, trainer.task, {}
    for iteration in range(2):
        specs = my_share(task.training_specs(iteration, config.rollout.episodes))
        played = play(config, engine, task, specs, greedy=False)
        told = [dataclasses.replace(t, reward_vector=np.array([t.turn_rewards.sum(), len(t.tokens)], np.float32))
                for t in played]  # fmt: skip
        folder = trainer.output / f"vectors-{iteration}"
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(folder, engine.header(task.vocabulary.fingerprint), told, name=f"rank-{dist.get_rank()}")
        dist.barrier()
        batch, _ = load_validated(config, folder, trainer.fingerprint, 0)
        scored = score_batch(trainer.models, batch)
        values = scored.metrics | means(train_epochs(trainer.models, scored, iteration, trainer._timed)[0])
    return values, bool(scored.advantages.abs().max() > 0.1)


def test_vpo(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    values, spread = ranks.run(run_vpo, 2, configured(base, "vpo", tmp_path / "run"))[0]
    assert spread and values["actor/stepped"] == 1 and all(math.isfinite(v) for v in values.values())
