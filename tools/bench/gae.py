"""Time GAE against a Python loop over time steps, and check that both give the same values."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

# Runs from a checkout without installing it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.objectives.advantages import gae, length_adaptive_lambda  # noqa: E402

GAMMA, LAM_ACTOR, LAM_CRITIC = 0.999, 0.95, 1.0


def looped_gae(rewards: Tensor, values: Tensor, successors: Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """The recursion on zero-padded `[B, T]` tensors, one Python step per time step, all sequences at once.

    Zero padding makes masks unnecessary: both sums are still zero when a sequence's last decision is reached.
    """
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    actor = critic = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        error = rewards[:, t] + GAMMA * successors[:, t] - values[:, t]
        actor = error + GAMMA * lam * actor
        critic = error + GAMMA * LAM_CRITIC * critic
        advantages[:, t], returns[:, t] = actor, critic + values[:, t]
    return advantages, returns


def timed(function: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, tuple[Tensor, Tensor]]:
    """(seconds, result)."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def compare(label: str, lengths: Tensor, steps: int, repeats: int, lam: float | Tensor) -> None:
    """Print times, ratio and the largest difference for one set of lengths."""
    inside = torch.arange(steps) < lengths[:, None]
    rewards, values = torch.where(inside, torch.randn(2, *inside.shape), 0.0)
    bootstrap = torch.randn(lengths.numel())
    successors = torch.nn.functional.pad(values[:, 1:], (0, 1)).scatter(1, lengths[:, None] - 1, bootstrap[:, None])
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    flat = rewards[inside], values[inside]

    def ours() -> tuple[Tensor, Tensor]:
        return gae(*flat, offsets, gamma=GAMMA, lam_actor=lam, lam_critic=LAM_CRITIC, bootstrap=bootstrap)

    ours()
    fast = [timed(ours)[0] for _ in range(repeats)]
    loops = [timed(lambda: looped_gae(rewards, values, successors, lam)) for _ in range(repeats)]
    slow = [seconds for seconds, _ in loops]
    pairs = zip(ours(), loops[0][1], strict=True)
    gaps = [float((a - b[inside]).abs().max() / b.abs().max()) for a, b in pairs]
    typer.echo(
        f"{label}: {flat[0].numel()} decisions, gae {min(fast) * 1e3:.1f}-{max(fast) * 1e3:.1f} ms, "
        f"loop {min(slow) * 1e3:.0f}-{max(slow) * 1e3:.0f} ms, "
        f"ratio {min(slow) / max(fast):.0f}-{max(slow) / min(fast):.0f}; "
        f"max difference over max value: advantages {gaps[0]:.1e}, returns {gaps[1]:.1e}"
    )


def main(
    sequences: Annotated[int, typer.Option(help="B, sequences in the batch.")] = 64,
    steps: Annotated[
        int, typer.Option(help="T, decisions of the longest sequence; the loop takes that many steps.")
    ] = 32768,
    repeats: Annotated[int, typer.Option(help="Runs of each; the minimum and the maximum are printed.")] = 5,
) -> None:
    """Compare megatron_rl's GAE with a Python loop over time steps that handles all sequences at once.

    Both return advantages (λ_actor) and returns (λ_critic) in float32. The
    loop gets [B, T] tensors padded beforehand; ours works on the flat decision
    timeline. Three batches: all sequences of length T, ragged ones of 1..T,
    and the ragged ones with a λ per sequence. Run it on an idle machine.
    """
    torch.manual_seed(0)
    typer.echo(f"B={sequences}, T={steps}, float32, {torch.get_num_threads()} thread(s), min-max of {repeats}")
    full = torch.full((sequences,), steps)
    ragged = torch.randint(1, steps + 1, (sequences,))
    ragged[0] = steps
    compare("equal lengths", full, steps, repeats, LAM_ACTOR)
    compare("ragged", ragged, steps, repeats, LAM_ACTOR)
    adaptive = length_adaptive_lambda(ragged, GAMMA, 0.05).float()
    compare("ragged, λ per sequence", ragged, steps, repeats, adaptive)


if __name__ == "__main__":
    typer.run(main)
