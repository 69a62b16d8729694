"""Time every objective, forward and backward, against plain PPO clipping on the same decisions.

Each round times every objective once, and ratios are taken within a round, so that a change in the machine's speed
affects all of them. `ppo_clip` is in the table twice: the second row shows the error of the measurement.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# The profiler's library would print a line for each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch  # noqa: E402
import typer  # noqa: E402
from torch import Tensor  # noqa: E402

# Runs from a checkout without installing it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_rl.objectives import advantages, aggregation, groups, policy  # noqa: E402
from megatron_rl.objectives.numerics import moments  # noqa: E402
from megatron_rl.objectives.segments import local_segment_sum, repeat, segment_mean  # noqa: E402

SEQUENCE, TURN, GROUP = 1000, 20, 8
"""Mean decisions of a sequence and of a turn; sequences of a prompt."""
LIMIT = 3.0
"""Ratio over ppo_clip that no objective should exceed."""


@dataclass(frozen=True)
class Batch:
    """Inputs of all objectives: per decision `[D]`, turn `[K]` or sequence `[B]`."""

    logprobs: Tensor
    """log π_θ, the leaf that gradients reach."""
    anchor: Tensor
    behaviour: Tensor
    advantages: Tensor
    rewards: Tensor
    values: Tensor
    weights: Tensor
    offsets: Tensor
    turns: Tensor
    sequence_turns: Tensor
    group_ids: Tensor
    turn_advantages: Tensor
    sequence_advantages: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """ℓ, carrying gradients."""
        return self.logprobs - self.anchor

    def copied(self, per_segment: Tensor, offsets: Tensor) -> Tensor:
        """A loss of segments on the decisions."""
        return repeat(per_segment, offsets, total=self.logprobs.numel())


def make_batch(decisions: int) -> Batch:
    """Ragged sequences of ragged turns, with ratios of which about a tenth is clipped."""
    generator = torch.Generator().manual_seed(0)
    logprobs, noise, drift, adv, values = torch.randn(5, decisions, generator=generator)
    turns = _cuts(decisions, decisions // TURN, generator)
    inner = _cuts(turns.numel() - 1, max(decisions // SEQUENCE, 2), generator)
    offsets = turns[inner]
    sequences = offsets.numel() - 1
    logprobs = -logprobs.abs()
    anchor = logprobs + 0.15 * noise
    counts, _ = aggregation.count(offsets.diff())
    per_sequence = aggregation.sequence_weights("token_mean", offsets.diff(), counts)
    return Batch(
        logprobs=logprobs.requires_grad_(), anchor=anchor.detach(), behaviour=(anchor + 0.05 * drift).detach(),
        advantages=adv, rewards=adv * (torch.rand(decisions, generator=generator) < 0.01), values=values,
        weights=aggregation.decision_weights(per_sequence, offsets), offsets=offsets, turns=turns,
        sequence_turns=inner, group_ids=torch.arange(sequences) // GROUP,
        turn_advantages=segment_mean(adv, turns), sequence_advantages=segment_mean(adv, offsets),
    )  # fmt: skip


def _cuts(total: int, pieces: int, generator: torch.Generator) -> Tensor:
    """Offsets of `pieces` non-empty pieces of random length."""
    inner = torch.randperm(total - 1, generator=generator)[: pieces - 1] + 1
    return torch.cat((torch.tensor([0]), inner.sort().values, torch.tensor([total])))


def _corrected(b: Batch, per_decision: policy.PolicyLoss, log_ratio: Tensor) -> Tensor:
    """The loss divided by the bound on the clipping bias, as `s_ppo` and `st_ppo` do it."""
    bound = policy.clipping_bias_bound(per_decision, log_ratio, b.advantages, b.logprobs, b.weights)
    return per_decision.loss / policy.clipping_bias_divisor(bound).float()


def _st_ppo(b: Batch) -> Tensor:
    turn = segment_mean(b.log_ratio, b.turns)
    result = policy.ppo_clip(turn, b.turn_advantages)
    spread = policy.PolicyLoss(*(b.copied(part, b.turns) for part in result))
    return _corrected(b, spread, b.copied(turn.detach(), b.turns))


LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    "ppo_clip": lambda b: policy.ppo_clip(b.log_ratio, b.advantages).loss,
    "ppo_clip (again)": lambda b: policy.ppo_clip(b.log_ratio, b.advantages).loss,
    "reinforce": lambda b: policy.reinforce(b.logprobs, b.advantages),
    "dual_clip": lambda b: policy.dual_clip(policy.ppo_clip(b.log_ratio, b.advantages), b.advantages).loss,
    "ewma_decoupled": lambda b: policy.ewma_decoupled(b.logprobs, b.anchor, b.behaviour, b.advantages).loss,
    "gspo": lambda b: b.copied(policy.gspo(b.log_ratio, b.sequence_advantages, b.offsets).loss, b.offsets),
    "gspo_token": lambda b: policy.gspo_token(b.log_ratio, b.advantages, b.offsets).loss,
    "gmpo": lambda b: b.copied(policy.gmpo(b.log_ratio, b.sequence_advantages, b.offsets).loss, b.offsets),
    "cispo": lambda b: policy.cispo(b.log_ratio, b.logprobs, b.advantages, clip_high=0.28).loss,
    "sapo": lambda b: policy.sapo(b.log_ratio, b.advantages),
    "dis": lambda b: policy.dis(b.logprobs - b.behaviour, b.logprobs, b.advantages).loss,
    "turn_ppo": lambda b: b.copied(policy.turn_ppo(b.log_ratio, b.turn_advantages, b.turns).loss, b.turns),
    "turn_is": lambda b: b.copied(policy.turn_is(b.log_ratio, b.turn_advantages, b.turns).loss, b.turns),
    "turn_is_per_decision": lambda b: policy.turn_is_per_decision(b.log_ratio, b.advantages, b.turns).loss,
    "s_ppo": lambda b: _corrected(b, policy.ppo_clip(b.log_ratio, b.advantages), b.log_ratio.detach()),
    "st_ppo": _st_ppo,
    "drpo": lambda b: policy.drpo(b.logprobs, b.sequence_advantages, b.offsets.diff(), b.offsets),
}


def _gae(b: Batch, **settings) -> tuple[Tensor, Tensor]:
    return advantages.gae(
        b.rewards, b.values, b.offsets, **{"gamma": 0.999, "lam_actor": 0.95} | settings,
        bootstrap=torch.zeros(b.offsets.numel() - 1),
    )  # fmt: skip


def _turn_gae(b: Batch) -> Tensor:
    found, _ = advantages.turn_gae(
        b.rewards, b.values, b.turns, b.sequence_turns, bootstrap=torch.zeros(b.sequence_turns.numel() - 1)
    )
    return b.copied(found, b.turns)


def _evpo(b: Batch) -> Tensor:
    found, returns = _gae(b)
    return advantages.evpo(found, returns, moments(returns), moments(returns - b.values))[0]


def _group(b: Batch, estimator: Callable[..., Tensor]) -> Tensor:
    return b.copied(estimator(local_segment_sum(b.rewards, b.offsets), b.group_ids), b.offsets)


def _drpo(b: Batch) -> Tensor:
    scores = segment_mean(b.logprobs.detach(), b.offsets)
    coefficients = groups.drpo_coefficients(
        scores, b.sequence_advantages > 0, b.offsets.diff(), b.group_ids, max_length=10 * SEQUENCE
    )
    return b.copied(coefficients.score, b.offsets)


ESTIMATORS: dict[str, Callable[[Batch], object]] = {
    "gae": _gae,
    "gae (again)": _gae,
    "gae, λ of its own for each sequence": lambda b: _gae(
        b, lam_actor=advantages.length_adaptive_lambda(b.offsets.diff(), 0.999, 0.05)
    ),
    "turn_gae": _turn_gae,
    "grpo": lambda b: _group(b, groups.grpo),
    "dr_grpo": lambda b: _group(b, groups.dr_grpo),
    "rloo": lambda b: _group(b, groups.rloo),
    "batch_mean": lambda b: _group(b, lambda rewards, _: groups.batch_mean_baseline(rewards)),
    "evpo": _evpo,
    "drpo (pre-pass over groups)": _drpo,
    "whiten (on top of any)": lambda b: advantages.whiten(b.advantages),
}
USES = {
    "gspo": "grpo", "gmpo": "grpo", "cispo": "grpo", "sapo": "grpo", "turn_ppo": "turn_gae",
    "dis": "gae, λ of its own for each sequence", "drpo": "drpo (pre-pass over groups)", "reinforce": "batch_mean",
}  # fmt: skip
"""Estimator that the method's paper pairs its loss with; `gae` for the others."""


def step(loss: Callable[[Batch], Tensor], b: Batch) -> None:
    """Forward, weights, backward."""
    b.logprobs.grad = None
    aggregation.weighted_sum(loss(b), b.weights).backward()


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object], leaf: Tensor) -> int:
    """Most bytes of tensors alive at once during the call, beyond those alive before it, the gradient of `leaf`
    included; from the profiler's record of every allocation."""
    leaf.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def rounds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call in every round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            elapsed = timed(call)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, list[float]]:
    """Each time over the base's of the same round, ascending."""
    return {
        name: sorted(own / plain for own, plain in zip(column, seconds[base], strict=True))
        for name, column in seconds.items()
    }


def spread(values: list[float]) -> str:
    """least / median / greatest."""
    return f"{values[0]:.2f} / {statistics.median(values):.2f} / {values[-1]:.2f}"


def main(
    decisions: Annotated[int, typer.Option(help="D, decisions of the batch.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 7,
) -> None:
    """Print two tables: policy losses over ppo_clip, and advantage estimators over GAE.

    A loss is timed with weighting and backward down to log π_θ, in float32 on one thread or as many as
    OMP_NUM_THREADS says. Ratios are least / median / greatest over rounds.
    """
    b = make_batch(decisions)
    losses = {name: (lambda loss=loss: step(loss, b)) for name, loss in LOSSES.items()}
    estimators = {name: (lambda call=call: call(b)) for name, call in ESTIMATORS.items()}
    seconds, estimator_seconds = rounds(losses, repeats), rounds(estimators, repeats)
    found, estimator_found = ratios(seconds, "ppo_clip"), ratios(estimator_seconds, "gae")
    peaks = {name: peak_bytes(call, b.logprobs) for name, call in losses.items()}
    sequences, turns = b.offsets.numel() - 1, b.turns.numel() - 1
    typer.echo(f"{decisions} decisions, {turns} turns, {sequences} sequences, {torch.get_num_threads()} thread(s)\n")
    typer.echo("| loss | ms | over ppo_clip | peak MB | over ppo_clip | with estimator | ms |")
    typer.echo("|---|---|---|---|---|---|---|")
    for name, peak in peaks.items():
        partner = USES.get(name, "gae")
        typer.echo(
            f"| {name} | {1e3 * statistics.median(seconds[name]):.1f} | {spread(found[name])} | {peak / 1e6:.1f} | "
            f"{peak / peaks['ppo_clip']:.2f} | {partner} | {1e3 * statistics.median(estimator_seconds[partner]):.1f} |"
        )
    typer.echo("\n| estimator | ms | over gae |\n|---|---|---|")
    for name, column in estimator_seconds.items():
        typer.echo(f"| {name} | {1e3 * statistics.median(column):.1f} | {spread(estimator_found[name])} |")
    slow = [name for name, column in found.items() if statistics.median(column) > LIMIT]
    typer.echo(f"\nabove {LIMIT:g} times ppo_clip: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    typer.run(main)
