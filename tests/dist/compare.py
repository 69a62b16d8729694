"""How far a layout's results are from the baseline's, against stated bounds; and whether the experiment reaches every
branch of the objective without standing on one of their edges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.rollouts.schema import RolloutBatch
from tests.dist.experiment import Result, StepResult, Weights

NOT_COMPARED = ("micro_batches",)
"""Metrics that say how the layout works, not what it computes."""


@dataclass(frozen=True)
class Bounds:
    """Largest accepted errors."""

    logprob: float = 1e-5
    """Absolute, nats."""
    value: float = 1e-5
    """Absolute."""
    scalar: float = 3e-6
    """Of a logged scalar, over max(|it|, the size of the terms it is summed from). Most are means of exponentials of
    log-probs, whose own rounding is up to 1.5e-6 nats and depends on how a processor sums."""
    gradient: float = 1e-5
    """‖error‖ of a parameter's gradient over max(its norm, `floor` of the model's)."""
    floor: float = 1e-3
    norm: float = 1e-5
    """Relative, of the global gradient norm."""
    weight: float = 1e-3
    """Absolute, of weights and EWMA after a step, in learning rates."""


QUANTITIES = ("logprob", "value", "scalar", "gradient", "norm", "weight")


def errors(found: Result, expected: Result, lr: float, floor: float = Bounds.floor) -> dict[str, float]:
    """Worst error of each quantity of `Bounds`, over both steps and all tensors."""
    worst = dict.fromkeys(QUANTITIES, 0.0)
    for quantity, error in _all_errors(found, expected, lr, floor):
        worst[quantity] = error if math.isnan(error) else max(worst[quantity], error)
    return worst


def violations(worst: Mapping[str, float], bounds: Bounds) -> dict[str, tuple[float, float]]:
    """(found, bound) of each quantity beyond its bound. NaN is beyond any."""
    limits = vars(bounds)
    return {name: (error, limits[name]) for name, error in worst.items() if not error <= limits[name]}


def _all_errors(found: Result, expected: Result, lr: float, floor: float) -> Iterator[tuple[str, float]]:
    for name, values in expected.scored.items():
        yield "value", _largest(found.scored[name] - values)
    size = _mean_logprob(expected.steps[0])
    scales = {name: size for name in expected.metrics if name.startswith(("mismatch/", "policy/"))}
    # 1 − Var/Var: its terms are of size 1, however small it is itself.
    scales |= {name: 1.0 for name in expected.metrics if "explained_variance" in name}
    for _, error in _scalar_errors(found.metrics, expected.metrics, scales):
        yield "scalar", error
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        yield from _step_errors(ours, theirs, lr, floor)


def _step_errors(found: StepResult, expected: StepResult, lr: float, floor: float) -> Iterator[tuple[str, float]]:
    for name, values in expected.readings.items():
        yield "value" if name == "values" else "logprob", _largest(found.readings[name] - values)
    for name, error in _scalar_errors(found.metrics, expected.metrics, _scales(expected)):
        yield "norm" if name.endswith("grad_norm") else "scalar", error
    for name, gradients in expected.gradients.items():
        for error in gradient_errors(found.gradients[name], gradients, floor).values():
            yield "gradient", error
    for name, weights in expected.weights.items():
        for key, weight in weights.items():
            yield "weight", _largest(found.weights[name][key] - weight) / lr
    yield "scalar", abs(found.z - expected.z)


def gradient_errors(found: Weights, expected: Weights, floor: float = Bounds.floor) -> dict[str, float]:
    """‖error‖ over max(own norm, `floor` of the total) of each tensor."""
    assert found.keys() == expected.keys()
    total = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    return {
        name: float((found[name].double() - g.double()).norm() / max(float(g.double().norm()), floor * total))
        for name, g in expected.items()
    }


def _scales(step: StepResult) -> dict[str, float]:
    """Metric → size of the terms it is summed from: Σ|w·term| of its model's step, or mean |log π| where it is a
    function of log-ratios (mismatch, effective sample sizes)."""
    sizes = {name.split("/")[0]: size for name, size in step.metrics.items() if name.endswith("/magnitude")}
    sizes["mismatch"] = sizes["is"] = _mean_logprob(step)
    return {name: sizes.get(name.split("/")[0], 0.0) for name in step.metrics}


def _mean_logprob(step: StepResult) -> float:
    """Mean |log π| of the step's decisions; all others read 0."""
    logprobs = step.readings["theta"]
    return float(logprobs[logprobs != 0].abs().mean())


def _scalar_errors(found: Mapping[str, float], expected: Mapping[str, float], scales: Mapping[str, float]):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.split("/")[1] not in NOT_COMPARED:
            scale = max(abs(value), scales.get(name, 0.0)) or 1.0
            yield name, abs(found[name] - value) / scale


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def branches(result: Result, batch: RolloutBatch, algorithm: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Share of the first step's decisions in each branch, and the distance of the nearest edge between two branches."""
    first, scored = result.steps[0], result.scored
    readings, advantages = first.readings, scored["advantages"]
    ratio = (readings["theta"] - readings["anchor"]).exp()
    up, down = advantages > 0, advantages < 0
    policy = algorithm["policy"]
    low, high, dual = 1 - policy["clip_low"], 1 + policy["clip_high"], policy["dual_clip"]
    capped, sequence_edge = _capped(readings["anchor"], batch, algorithm["importance"]["cap"])
    clipped, value_edge = _value_branch(readings["values"], scored, algorithm["value"]["clip"])
    shares = {
        "clip_low": down & (ratio < low),
        "clip_high": up & (ratio > high),
        "dual_clip": down & (ratio > dual),
        "value_clip": clipped,
        "sequence_cap": capped,
    }
    edges = [(ratio - edge).abs().min() for edge in (low, high, dual)] + [advantages.abs().min()]
    return {name: float(hit.double().mean()) for name, hit in shares.items()}, float(
        min(*edges, value_edge, sequence_edge)
    )


def _value_branch(values: torch.Tensor, scored: Mapping[str, torch.Tensor], clip: float):
    old, returns = scored["values"], scored["returns"]
    near = old + (values - old).clamp(-clip, clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    moved = (values - old).abs()
    outside = moved > clip
    ties = torch.where(outside, (plain - bounded).abs(), torch.inf)
    return outside & (bounded > plain), min((moved - clip).abs().min(), ties.min())


def _capped(anchor: torch.Tensor, batch: RolloutBatch, cap: float):
    behaviour = torch.as_tensor(batch.logprobs[batch.action_mask])
    counts = [int(batch.action_mask[a:b].sum()) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    sums = [part.sum().exp() if len(part) else torch.zeros(()) for part in (anchor - behaviour).split(counts)]
    whole = torch.stack(sums).repeat_interleave(torch.tensor(counts))
    return whole > cap, (whole - cap).abs().min()
