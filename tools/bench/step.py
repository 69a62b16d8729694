"""What a policy update costs over a bare Megatron forward-backward of the same packed micro-batches.

    python tools/bench/step.py            # demo size and ~100 M parameters, one rank
    python tools/bench/step.py --help

In one run, alternating, so that whatever else the machine does hits both. Seconds are this process's CPU seconds where
there is no GPU:

* update / bare: our step (cut micro-batches, routes, replayed forward, loss, backward) over Megatron's own GPTModel
  with its output layer and cross-entropy on the same tokens. Optimizer step in neither.
* replay on / off.
* packed / padded tokens per second.
* EWMA: the same step with an EWMA anchor, whose log-probs cost one more forward, over the step without.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZES = {
    "demo": {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_experts": 8,
             "moe_hidden_size": 64},
    "100M": {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "num_experts": 16,
             "moe_hidden_size": 512},
}  # fmt: skip


def main(
    sizes: list[str] = typer.Option(list(SIZES), "--size", help="Model sizes to run."),
    repeats: int = typer.Option(5, help="Timed runs of each side."),
    sequences: int = typer.Option(24, help="Trajectories in the step."),
    budget: int = typer.Option(1024, help="Tokens of a micro-batch."),
) -> None:
    """Print each ratio with its minimum and maximum over the repeats."""
    from megatron_rl.config import parse_config
    from megatron_rl.launch.environment import ranks

    table = Table("size", "comparison", "median", "min", "max", "bound")
    with ranks(parse_config({})) as topology, tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            _bench(size, Path(folder), topology, repeats, sequences, budget, table)
    Console().print(table)


def _bench(size: str, folder: Path, topology, repeats: int, sequences: int, budget: int, table: Table) -> None:
    from megatron_rl.config import parse_config
    from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
    from megatron_rl.environments.vocabulary import Vocabulary
    from megatron_rl.training.actor_critic import build_actor_critic

    vocabulary = Vocabulary([f"w{i}" for i in range(4096 if size != "demo" else 32)])
    parameters = write_tiny_checkpoint(folder / size, vocabulary, TinyShape(**SIZES[size]))
    config = parse_config({
        "model": {"path": str(folder / size), "dtype": "float32"},
        "batching": {"token_budget": budget},
        "algorithm": {"anchor": "recompute"},
    })  # fmt: skip
    models = build_actor_critic(config, topology)
    batch = synthetic_batch(models.actor.model.hf, sequences, longest=budget // 4)
    steps = _steps(models, batch)
    tokens = int(batch.offsets[-1])
    print(f"{size}: {parameters / 1e6:.1f} M parameters, {sequences} trajectories, {tokens} tokens", flush=True)
    for name, numerator, denominator, bound in (
        ("update / bare Megatron", "update", "bare", "≤ 1.10"),
        ("replay on / off", "update", "native", "≤ 1.02"),
        ("packed / padded tokens per second", "padded", "update", "> 1"),
        ("with EWMA anchor / without", "ewma", "update", "~ 4/3"),
    ):
        ratios = paired(steps[numerator], steps[denominator], repeats)
        table.add_row(size, name, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}", bound)


def paired(numerator: Callable[[], None], denominator: Callable[[], None], repeats: int) -> list[float]:
    """Ratios of seconds of two callables run in turn."""
    numerator(), denominator()
    ratios = []
    for _ in range(repeats):
        ratios.append(_seconds(numerator) / _seconds(denominator))
    return ratios


def _seconds(run: Callable[[], None]) -> float:
    """Seconds of one run: CPU seconds of this process where there is no GPU, so that a busy machine changes little."""
    if not torch.cuda.is_available():
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def synthetic_batch(hf, sequences: int, longest: int, seed: int = 0):
    """Random multi-turn trajectories with random routes."""
    from megatron_rl.rollouts.schema import ModelFingerprint, RolloutBatch, RolloutHeader, SamplingTruth

    rng = np.random.default_rng(seed)
    lengths = rng.integers(longest // 3, longest + 1, sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    mask = (position % 16 >= 8) & (position > 0)
    turn = np.where(mask, position // 16, -1).astype(np.int16)
    turns = np.array([len(np.unique(turn[a:b][mask[a:b]])) for a, b in zip(offsets, offsets[1:], strict=False)])
    routes = tuple(
        np.argsort(rng.random((len(hf.moe_layers), n - 1, hf.num_experts)), -1)[..., : hf.topk].astype(np.uint8)
        for n in lengths
    )
    names = tuple(str(i) for i in range(sequences))
    fingerprint = ModelFingerprint.of(hf, "bench")
    return RolloutBatch(
        RolloutHeader(fingerprint, SamplingTruth(), "bench"), names, names, names, offsets,
        rng.integers(0, hf.vocab_size, total).astype(np.int32), mask, turn,
        np.where(mask, np.float32(-2.0), np.float32(0.0)), np.zeros(total, np.int32),
        np.concatenate([[0], np.cumsum(turns)]), rng.normal(size=int(turns.sum())).astype(np.float32),
        rng.normal(size=sequences).astype(np.float32), ("completed",) * sequences, np.ones(sequences, bool),
        np.zeros(sequences, bool), np.zeros(sequences + 1, np.int64), np.zeros(0, np.int32), np.ones(sequences, bool),
        routes, tuple(("bench", i) for i in range(sequences)),
    )  # fmt: skip


def _steps(models, batch) -> dict[str, Callable[[], None]]:
    """The sides of the comparisons; every one accumulates gradients and none steps the optimizer."""
    from megatron_rl.algorithm.step_losses import PolicyStepLoss, loss_weights
    from megatron_rl.algorithm.whole_step import StepVectors
    from megatron_rl.backend.step import train
    from megatron_rl.methods.aggregation_rules import TokenMean
    from megatron_rl.training.forward import policy_logprobs, prepare, sampling_readout, streams

    actor, _ = streams(batch)
    rows = np.arange(len(batch))
    device = next(models.actor.model.bare[0].parameters()).device
    decisions = np.concatenate([[0], np.cumsum(batch.action_mask)])[batch.offsets]
    offsets = torch.as_tensor(decisions, device=device)
    flat = torch.zeros(int(offsets[-1]), device=device)
    weights = loss_weights(TokenMean(), offsets, flat == 0, torch.as_tensor(rows, device=device))
    vectors = StepVectors(flat + 1, flat - 2, flat - 2, None, weights, None)
    terms = PolicyStepLoss(models.config.algorithm, vectors, kl_coef=0.0)
    unpacked = models.config.batching.model_copy(update={"packed": False})
    padded = _with_batching(models, unpacked)

    def update(live=models, replay=True):
        made = prepare(live, live.actor.model, actor, batch, rows, replay=replay)
        train(live.actor.model, made.micro_batches, made.plan.length, sampling_readout(live.config), terms)

    def with_anchor():
        policy_logprobs(models, actor, batch, rows)
        update()

    bare = prepare(models, models.actor.model, actor, batch, rows, replay=False)
    return {
        "update": update,
        "native": lambda: update(replay=False),
        "padded": lambda: update(padded),
        "ewma": with_anchor,
        "bare": lambda: bare_forward_backward(models, bare.micro_batches, bare.plan.length),
    }


def _with_batching(models, batching):
    import dataclasses

    return dataclasses.replace(models, config=models.config.model_copy(update={"batching": batching}))


def bare_forward_backward(models, micro_batches, length: int) -> None:
    """Megatron's own path on the same tokens: stock routing, output layer over all positions, its cross-entropy."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = models.actor.model
    chunk, kept = model.bare[0], model.bare[0].output_layer
    hooks = [(handle, handle.router) for handle in model.registry.handles]
    chunk.output_layer = kept._plain[0]
    for handle, router in hooks:
        router.router_replay, router.routing = None, handle._route
    model.chunks[0].zero_grad_buffer()

    def forward_step(iterator, wrapped):
        part = next(iterator)
        labels = part.tokens.roll(-1, 1)
        losses = wrapped(part.tokens, part.positions, None, labels=labels, packed_seq_params=part.attention)
        return losses, lambda out: (out.float().mean(), torch.zeros((), dtype=torch.int), {})

    try:
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(micro_batches), model=model.chunks[0],
            num_microbatches=len(micro_batches), seq_length=length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
    finally:
        chunk.output_layer = kept
        for handle, router in hooks:
            router.router_replay, router.routing = handle, handle.routing


if __name__ == "__main__":
    typer.run(main)
