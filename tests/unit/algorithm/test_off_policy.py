"""Weights and removals between sampler and anchor, against loops; removal comes before counting."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithm.off_policy import accepted_decisions, importance_weights
from megatron_rl.algorithm.step_losses import loss_weights
from megatron_rl.config import AlgorithmConfig
from megatron_rl.methods.aggregation_rules import TokenMean

OFFSETS, TURNS = torch.tensor([0, 3, 3, 5, 9]), torch.tensor([0, 2, 3, 5, 6, 9])
LOG_RATIO = torch.tensor([0.5, -0.2, 1.0, -1.5, 0.3, 0.1, 0.2, 2.0, -0.1])
BEHAVIOUR = -torch.rand(9, generator=torch.Generator().manual_seed(0)) - 3
ANCHOR = BEHAVIOUR + LOG_RATIO
KEPT = torch.tensor([True] * 7 + [False, True])


def algorithm(**settings) -> AlgorithmConfig:
    return AlgorithmConfig(anchor="recompute", **settings)


def weights_of(kept=KEPT) -> torch.Tensor:
    return loss_weights(TokenMean(), OFFSETS, kept, torch.arange(4))


def spans(offsets, kept=KEPT) -> list[list[int]]:
    return [[j for j in range(a, b) if kept[j]] for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]


CASES = {
    "token": (dict(name="token", cap=1.5), lambda r: [min(math.exp(x), 1.5) for x in r]),
    "icepop": (dict(name="icepop", low=0.5, high=1.3),
               lambda r: [math.exp(x) if 0.5 <= math.exp(x) <= 1.3 else 0.0 for x in r]),
    "sequence": (dict(name="sequence", cap=2.0), lambda r: _each(r, OFFSETS, lambda xs: min(math.exp(sum(xs)), 2.0))),
    "geometric": (dict(name="geometric", cap=1.2),
                  lambda r: _each(r, OFFSETS, lambda xs: min(math.exp(sum(xs) / len(xs)), 1.2))),
    "turn": (dict(name="turn", cap=1.3), lambda r: _each(r, TURNS, lambda xs: min(math.exp(sum(xs)), 1.3))),
    "turn mean": (dict(name="turn", cap=1.3, mean=True),
                  lambda r: _each(r, TURNS, lambda xs: min(math.exp(sum(xs) / len(xs)), 1.3))),
}  # fmt: skip


def _each(ratios: list[float], offsets, rule) -> list[float]:
    found = [0.0] * len(ratios)
    for span in spans(offsets):
        for j in span:
            found[j] = rule([ratios[k] for k in span])
    return found


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_slow_ones(case: str, normalise: bool) -> None:
    settings, slow = CASES[case]
    weights = weights_of()
    omega, metrics = importance_weights(
        algorithm(importance=settings | {"normalise": normalise}), ANCHOR, BEHAVIOUR, OFFSETS, TURNS, weights
    )
    expected = slow(LOG_RATIO.tolist())
    if normalise and case in ("token", "icepop"):
        mean = sum(e for e, k in zip(expected, KEPT, strict=True) if k) / int(KEPT.sum())
        expected = [e / mean for e in expected]
    elif normalise:
        cut = TURNS if case.startswith("turn") else OFFSETS
        present = [span for span in spans(cut) if span]
        mean = sum(expected[span[0]] for span in present) / len(present)
        expected = [e / mean for e in expected]
    assert omega[KEPT].tolist() == pytest.approx([e for e, k in zip(expected, KEPT, strict=True) if k], rel=1e-5)
    unit = "token" if case in ("token", "icepop") else case.split()[0].replace("geometric", "sequence")
    assert {f"is/{unit}_ess", f"is/{unit}_ess_raw"} <= set(metrics) and all(0 < v <= 1 for v in metrics.values())


def test_no_correction_is_no_weights() -> None:
    assert importance_weights(algorithm(), ANCHOR, BEHAVIOUR, OFFSETS, TURNS, weights_of()) == (None, {})


def test_a_zero_weight_keeps_the_denominator_and_a_removal_does_not() -> None:
    weights = weights_of()
    assert weights[KEPT].tolist() == pytest.approx([1 / 8] * 8) and weights[~KEPT].tolist() == [0.0]
    omega, _ = importance_weights(
        algorithm(importance={"name": "icepop", "low": 0.5, "high": 1.3}), ANCHOR, BEHAVIOUR, OFFSETS, TURNS, weights
    )
    assert int((omega[KEPT] == 0).sum()) == 4 and float(weights.sum()) == pytest.approx(1)


K3 = [math.exp(x) - 1 - x for x in LOG_RATIO.tolist()]
REJECTIONS = {
    "token": lambda span: [j for j in span if K3[j] <= 0.3],
    "sequence_mean": lambda span: span if sum(K3[j] for j in span) / max(len(span), 1) <= 0.3 else [],
    "sequence_max": lambda span: span if max([K3[j] for j in span], default=0) <= 0.3 else [],
}


@pytest.mark.parametrize("rule", REJECTIONS)
def test_rejection_is_the_slow_one(rule: str) -> None:
    kept = accepted_decisions(algorithm(rejection={"unit": rule, "max": 0.3}), ANCHOR, BEHAVIOUR, OFFSETS, KEPT)
    expected = [j for span in spans(OFFSETS) for j in REJECTIONS[rule](span)]
    assert kept.nonzero().flatten().tolist() == expected and 0 < len(expected) < int(KEPT.sum())


def test_rejection_on_k1_has_two_sides() -> None:
    rejection = {"unit": "token", "estimator": "k1", "max": 1.0, "min": -0.4}
    kept = accepted_decisions(algorithm(rejection=rejection), ANCHOR, BEHAVIOUR, OFFSETS, KEPT)
    assert kept.tolist() == [bool(k) and -1.0 <= x <= 0.4 for k, x in zip(KEPT, LOG_RATIO, strict=True)]


def test_veto_removes_whole_sequences_and_ignores_what_is_gone() -> None:
    kept = accepted_decisions(algorithm(veto=0.3), ANCHOR, BEHAVIOUR, OFFSETS, KEPT)
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 8]
    poisoned = torch.where(KEPT, ANCHOR, -torch.inf)
    assert torch.equal(accepted_decisions(algorithm(veto=0.3), poisoned, BEHAVIOUR, OFFSETS, KEPT), kept)


def test_all_rejected_leaves_nothing() -> None:
    kept = accepted_decisions(algorithm(rejection={"unit": "token", "max": -1.0}), ANCHOR, BEHAVIOUR, OFFSETS, KEPT)
    assert not kept.any() and not loss_weights(TokenMean(), OFFSETS, kept, torch.arange(4)).any()
