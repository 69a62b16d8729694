"""How far a bfloat16 engine is from a float32 trainer on the same weights, with and without replaying its routes.

    python tools/bench/mismatch.py [--model HF_CHECKPOINT]

Plays FrozenLake with the embedded engine in bfloat16, then scores its tokens with the float32 trainer twice. Prints
mean k3,
F(2) (share of tokens whose probability ratio exceeds 2) and the share of tokens whose native routes differ in some
layer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(
    model: Path = typer.Option(None, help="HF checkpoint; default: a tiny random one with wide logits."),
    episodes: int = typer.Option(256, help="Episodes to play."),
    temperature: float = typer.Option(1.0, help="Sampling temperature."),
) -> None:
    """Print the table; exit with 1 if replay does not lower the mean k3."""
    from megatron_rl.config import parse_config
    from megatron_rl.launch.environment import ranks

    with tempfile.TemporaryDirectory() as folder, ranks(parse_config({})) as topology:
        raise typer.Exit(_compare(model or _tiny(Path(folder)), Path(folder), topology, episodes, temperature))


def _tiny(folder: Path) -> Path:
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.frozen_lake import lake_vocabulary

    write_tiny_checkpoint(folder / "tiny", lake_vocabulary(), TinyShape(init_std=0.15))
    return folder / "tiny"


def _compare(path: Path, folder: Path, topology, episodes: int, temperature: float) -> int:
    from megatron_rl.config import parse_config
    from megatron_rl.engines.local import LocalEngine
    from megatron_rl.environments.tasks import make_task
    from megatron_rl.rollouts.store import read_batch, write_shard
    from megatron_rl.training.actor_critic import build_actor_critic
    from megatron_rl.training.forward import policy_logprobs, streams
    from megatron_rl.training.rollout_sources.sync import play
    from megatron_rl.training.score import mismatch_metrics

    config = parse_config({
        "model": {"path": str(path), "dtype": "float32"}, "batching": {"token_budget": 8192},
        "rollout": {"temperature": temperature, "max_action_tokens": 3},
    })  # fmt: skip
    task = make_task("frozen_lake", {})
    engine = LocalEngine(path, dtype=torch.bfloat16, temperature=temperature)
    played = play(config, engine, task, task.training_specs(0, episodes), greedy=False)
    write_shard(folder / "rollouts", engine.header(task.vocabulary.fingerprint), played)
    batch = read_batch(folder / "rollouts")
    models = build_actor_critic(config, topology)
    actor, _ = streams(batch)
    recorded = torch.tensor(batch.logprobs[batch.action_mask])
    table = Table("float32 trainer against bfloat16 engine", "mean k3 (nats)", "F(2)", "max |log ratio|")
    k3 = {}
    for name, replay in (("native routes", False), ("routes replayed (R3)", True)):
        found = mismatch_metrics(policy_logprobs(models, actor, batch, np.arange(len(batch)), replay=replay), recorded)
        k3[replay] = found["k3"]
        table.add_row(name, f"{found['k3']:.3e}", f"{found['extreme2']:.3e}", f"{found['largest']:.3f}")
    Console().print(table)
    print(
        f"{len(recorded)} decisions of {episodes} episodes; "
        f"tokens whose native routes differ: {differing(models, batch):.2%}"
    )
    print(f"replay cuts the mean k3 by a factor of {k3[False] / k3[True]:.1f}")
    return int(k3[True] >= k3[False])


def differing(models, batch) -> float:
    """Share of recorded tokens that the trainer would route to another set of experts in at least one layer."""
    from megatron_rl.backend.step import score
    from megatron_rl.training.forward import prepare, sampling_readout, streams

    actor, _ = streams(batch)
    model, changed, seen = models.actor.model, 0, 0
    for row in range(len(batch)):
        rows = np.array([row])
        made = prepare(models, model, actor, batch, rows, replay=False)
        score(model, made.micro_batches, made.plan.length, sampling_readout(models.config), record=True)
        wanted = batch.routes[row]
        own = np.stack([handle.recorded.cpu().numpy()[: wanted.shape[1]] for handle in model.registry.handles])
        differs = (np.sort(own, -1) != np.sort(wanted.astype(np.int64), -1)).any(-1).any(0)
        changed, seen = changed + int(differs.sum()), seen + len(differs)
    return changed / max(seen, 1)


if __name__ == "__main__":
    typer.run(main)
