"""Coefficients of whole-step losses are the gradients of slow losses written as loops, weights and removal included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.step_losses import PolicyStepLoss, loss_weights
from megatron_rl.algorithm.whole_step import StepVectors, whole_step_loss
from megatron_rl.config import AlgorithmConfig
from megatron_rl.methods import Segments
from megatron_rl.methods.aggregation_rules import SequenceMean
from tests.reference import methods

COUNTS = (5, 0, 7, 1, 4, 6)
"""Decisions of each sequence."""
TURNS = ([0, 0, 1, 2, 2], [], [0, 0, 0, 0, 1, 1, 1], [0], [0, 1, 1, 1], [0, 0, 1, 1, 2, 3])
GROUPS = ("a", "a", "a", "b", "b", "c")
CORRECT = (True, False, False, True, False, True)


def algorithm(name: str, *, estimator="gae", aggregation=None, entropy_coef: float = 0.0, **options) -> AlgorithmConfig:
    return AlgorithmConfig(
        policy={"name": name} | options, estimator=estimator, aggregation=aggregation, entropy_coef=entropy_coef,
        anchor="recompute",
    )  # fmt: skip


class Step:
    """One optimizer step's vectors, and the same as responses."""

    def __init__(self, algorithm: AlgorithmConfig, per: str, seed: int = 0, scale: float = 0.3) -> None:
        rng = torch.Generator().manual_seed(seed)
        total = sum(COUNTS)
        self.offsets = torch.tensor(np.cumsum((0, *COUNTS)))
        starts = [int(o) + j for o, turns in zip(self.offsets, TURNS, strict=False)
                  for j, turn in enumerate(turns) if j == 0 or turns[j - 1] != turn]  # fmt: skip
        self.turns = torch.tensor([*starts, total])
        self.logprobs = -torch.rand(total, generator=rng) - 0.2
        anchor = self.logprobs + scale * torch.randn(total, generator=rng)
        advantages = torch.randn(total, generator=rng)
        cut = self.offsets if per == "sequence" else self.turns
        if per != "decision":
            firsts = advantages[cut[:-1].clamp(max=total - 1)]
            advantages = firsts.repeat_interleave(cut.diff())
        groups = torch.tensor([ord(g) for g in GROUPS])
        kept = torch.ones(total, dtype=torch.bool)
        weights = loss_weights(algorithm.decision_weights, self.offsets, kept, groups)
        self.vectors = StepVectors(advantages, anchor, anchor, None, weights, None)
        self.segments = Segments(self.offsets, self.turns, groups, torch.tensor(CORRECT))

    def responses(self) -> tuple[torch.Tensor, list[methods.Response]]:
        leaf = self.logprobs.double().requires_grad_()
        return leaf, [
            methods.Response(leaf[a:b], self.vectors.anchor[a:b].double(), self.vectors.advantages[a:b].tolist(), turns,
                             group, correct)
            for a, b, turns, group, correct in zip(self.offsets, self.offsets[1:], TURNS, GROUPS, CORRECT, strict=False)
            if b > a
        ]  # fmt: skip


SEQUENCE = dict(estimator="grpo")
DRPO = dict(estimator="none", max_length=9, tau=2.0, beta=3.0)
CASES = {
    "gspo": (SEQUENCE | dict(clip_low=0.01, clip_high=0.02), "sequence", lambda r: methods.gspo(r, 0.01, 0.02)),
    "gmpo": (SEQUENCE, "sequence", lambda r: methods.gmpo(r, 0.4)),
    "turn_ppo": (dict(estimator="turn_gae"), "turn", lambda r: methods.turn_ppo(r, 0.2)),
    "turn_is": (dict(aggregation="sequence_sum_mean"), "decision", lambda r: methods.turn_is(r, 0.2)[0]),
    "drpo": (DRPO, "sequence",
             lambda r: methods.drpo(r, tau=2.0, lam=0.1, beta=3.0, delta=1e-4, max_length=9)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_coefficients_are_the_gradient_of_the_slow_loss(kind: str) -> None:
    settings, per, slow = CASES[kind]
    chosen = algorithm(kind, **settings)
    step = Step(chosen, per)
    found = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments)
    leaf, responses = step.responses()
    loss = slow(responses)
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found.coefficients.double(), expected, rtol=2e-6, atol=2e-7)
    if kind != "drpo":  # its log-sum-exp is not in the form whose gradient is followed
        assert float(found.values.double().sum()) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert bool(found.clipped_low.any() | found.clipped_high.any())


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage() -> None:
    settings = SEQUENCE | dict(clip_low=0.01, clip_high=0.02)
    step = Step(algorithm("gspo", **settings), "sequence")
    found = [
        whole_step_loss(algorithm(kind, **settings).policy, step.logprobs, step.vectors, step.segments)
        for kind in ("gspo", "gspo_token")
    ]
    torch.testing.assert_close(found[0].coefficients, found[1].coefficients)
    torch.testing.assert_close(found[0].values, found[1].values)


def test_bias_correction_divides_by_the_exact_norm() -> None:
    chosen = algorithm("st_ppo", aggregation="sequence_sum_mean", clipping_bias="exact")
    step = Step(chosen, "decision", scale=0.8)
    leaf, responses = step.responses()
    loss, lost = methods.turn_is(responses, 0.2)
    (gradient,) = torch.autograd.grad(loss, leaf)
    (cut,) = torch.autograd.grad(lost, leaf)
    seen = []

    def norm(coefficients: torch.Tensor) -> float:
        seen.append(coefficients)
        return 2.5

    found = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments, norm)
    torch.testing.assert_close(seen[0].double(), cut, rtol=1e-5, atol=1e-7)
    assert float(cut.abs().max()) > 0.1
    torch.testing.assert_close(found.coefficients.double(), gradient / 2.5, rtol=1e-5, atol=1e-7)
    assert found.metrics["actor/clipping_bias"] == 2.5
    assert 0 < found.metrics["actor/clip_ratio_extreme2"] < 1 and found.metrics["actor/clip_ratio_extreme5"] >= 0
    small = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments, lambda c: 0.5)
    torch.testing.assert_close(small.coefficients.double(), gradient, rtol=1e-5, atol=1e-7)


def test_the_bound_is_no_smaller_than_the_norm_over_logits() -> None:
    chosen = algorithm("s_ppo", aggregation="sequence_sum_mean")
    step = Step(chosen, "decision", scale=0.8)
    found = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments)
    assert found.metrics["actor/clipping_bias"] > 1
    free = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments, lambda c: 0.0)
    ratio = free.coefficients[free.coefficients != 0] / found.coefficients[free.coefficients != 0]
    torch.testing.assert_close(ratio, torch.full_like(ratio, found.metrics["actor/clipping_bias"]), rtol=1e-5, atol=0)


def test_removed_decisions_are_off_the_timeline() -> None:
    """A sequence ratio is the mean over what remains; what was removed may be anything, NaN included."""
    chosen = algorithm("gspo", **SEQUENCE, clip_low=0.01, clip_high=0.02)
    step = Step(chosen, "sequence")
    kept = torch.ones(sum(COUNTS), dtype=torch.bool)
    kept[[0, 6, 7, 12]] = False
    weights = loss_weights(SequenceMean(), step.offsets, kept, step.segments.groups)
    poisoned = torch.where(kept, step.logprobs, torch.nan)
    advantages, anchor = (torch.where(kept, x, torch.nan) for x in (step.vectors.advantages, step.vectors.anchor))
    vectors = StepVectors(advantages, poisoned, anchor, None, weights, None)
    found = whole_step_loss(chosen.policy, poisoned, vectors, step.segments)
    leaf, responses = step.responses()
    rest = []
    for r, start in zip(responses, [int(o) for o, n in zip(step.offsets, COUNTS, strict=False) if n], strict=True):
        own = [j for j in range(len(r.turns)) if kept[start + j]]
        if own:
            rest.append(methods.Response(r.logprobs[own], r.anchor[own], [r.advantages[j] for j in own],
                                         [r.turns[j] for j in own], r.group))  # fmt: skip
    assert len(rest) == len(responses) - 1
    (expected,) = torch.autograd.grad(methods.gspo(rest, 0.01, 0.02), leaf)
    torch.testing.assert_close(found.coefficients.double(), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("kind", ["sapo", "cispo"])
def test_token_losses_are_the_slow_losses(kind: str) -> None:
    settings = {"sapo": dict(aggregation="sequence_mean"), "cispo": dict(clip_high=0.3)}[kind]
    chosen = algorithm(kind, **settings)
    step = Step(chosen, "decision")
    logprobs = step.logprobs.clone().requires_grad_()
    terms = PolicyStepLoss(chosen, step.vectors, kl_coef=0.0)
    loss, sums = terms(torch.arange(len(logprobs)), torch.stack((logprobs, torch.zeros_like(logprobs))))
    leaf, responses = step.responses()
    slow = methods.sapo(responses, 1.0, 1.05) if kind == "sapo" else methods.cispo(responses, 0.3)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs)[0].double(), torch.autograd.grad(slow, leaf)[0], rtol=2e-6, atol=2e-7
    )
    assert float(loss) == pytest.approx(float(slow), rel=1e-5) and float(sums[0]) == pytest.approx(float(loss))


def test_micro_batches_add_up_to_the_whole_step() -> None:
    """Whatever slots a micro-batch holds, gradients and logged sums are those of the whole."""
    chosen = algorithm("gmpo", **SEQUENCE, entropy_coef=0.1)
    step = Step(chosen, "sequence")
    whole = whole_step_loss(chosen.policy, step.logprobs, step.vectors, step.segments)
    terms, total = PolicyStepLoss(chosen, step.vectors, 0.0, whole), sum(COUNTS)
    parts = torch.randperm(total, generator=torch.Generator().manual_seed(1)).split(5)
    logprobs = step.logprobs.clone().requires_grad_()
    readings = torch.stack((logprobs, torch.ones_like(logprobs)))
    found = [terms(slots, readings[:, slots]) for slots in parts]
    (gradient,) = torch.autograd.grad(sum(loss for loss, _ in found), logprobs)
    torch.testing.assert_close(gradient, whole.coefficients)
    sums = sum(sums for _, sums in found)
    assert float(sums[1]) == pytest.approx(float(whole.values.sum()), rel=1e-5)
    assert float(sums[0]) == pytest.approx(float(whole.values.sum()) - 0.1, rel=1e-5)
