"""Every objective at its limits: no NaN, and the result its docstring promises.

Each loss is brought to the decision timeline and weighted as a step would, so that what a trainer sees is tested, not
only the function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from megatron_rl.objectives import advantages, aggregation, groups, importance, policy, value
from megatron_rl.objectives.divergence import kl_loss
from megatron_rl.objectives.numerics import moments
from megatron_rl.objectives.segments import compact, repeat, segment_mean
from tests.unit.objectives.timelines import offsets_of

HUGE, TINY = math.exp(20), math.exp(-20)
"""Ratios are bounded to these."""


class Batch(NamedTuple):
    """One decision timeline; `turns` cuts it finer than `offsets`."""

    log_ratio: torch.Tensor
    advantages: torch.Tensor
    logprobs: torch.Tensor
    offsets: torch.Tensor
    turns: torch.Tensor

    def of(self, offsets: torch.Tensor) -> torch.Tensor:
        return segment_mean(self.advantages, offsets)


LOSSES = {
    "reinforce": lambda b: policy.reinforce(b.logprobs, b.advantages),
    "ppo_clip": lambda b: policy.ppo_clip(b.log_ratio, b.advantages, 0.2, 0.28).loss,
    "dual_clip": lambda b: policy.dual_clip(policy.ppo_clip(b.log_ratio, b.advantages, 0.2, 0.28), b.advantages).loss,
    "gspo": lambda b: repeat(policy.gspo(b.log_ratio, b.of(b.offsets), b.offsets).loss, b.offsets),
    "gspo_token": lambda b: policy.gspo_token(b.log_ratio, b.advantages, b.offsets).loss,
    "gmpo": lambda b: repeat(policy.gmpo(b.log_ratio, b.of(b.offsets), b.offsets).loss, b.offsets),
    "cispo": lambda b: policy.cispo(b.log_ratio, b.logprobs, b.advantages, clip_high=0.2).loss,
    "sapo": lambda b: policy.sapo(b.log_ratio, b.advantages),
    "dis": lambda b: policy.dis(b.log_ratio, b.logprobs, b.advantages).loss,
    "turn_ppo": lambda b: repeat(policy.turn_ppo(b.log_ratio, b.of(b.turns), b.turns).loss, b.turns),
    "turn_is": lambda b: repeat(policy.turn_is(b.log_ratio, b.of(b.turns), b.turns).loss, b.turns),
    "turn_is_per_decision": lambda b: policy.turn_is_per_decision(b.log_ratio, b.advantages, b.turns).loss,
    "ewma_decoupled": lambda b: (
        policy.ewma_decoupled(b.logprobs, (b.logprobs - b.log_ratio).detach(), b.logprobs.detach(), b.advantages).loss
    ),
    "drpo": lambda b: policy.drpo(b.logprobs, b.of(b.offsets), b.offsets.diff(), b.offsets),
}

LIMITS = {
    # loss at A = 1 and A = -1 for ℓ = 1e4, then for ℓ = -1e4; log π = -1 everywhere
    "reinforce": (1.0, -1.0, 1.0, -1.0),
    "ppo_clip": (-1.28, HUGE, -TINY, 0.8),
    "dual_clip": (-1.28, 3.0, -TINY, 0.8),
    "gspo": (-1.0004, HUGE, -TINY, 0.9997),
    "gspo_token": (-1.0004, HUGE, -TINY, 0.9997),
    "gmpo": (-math.exp(0.4), HUGE, -TINY, math.exp(-0.4)),
    "cispo": (1.2, -1.2, TINY, -TINY),
    "sapo": (-4.0, 4 / 1.05, -4 / (1 + math.e), 4 / 1.05 / (1 + math.exp(1.05))),
    "dis": (0.0, 0.0, 0.0, 0.0),
    "turn_ppo": (-1.2, HUGE, -TINY, 0.8),
    "turn_is": (-1.2, HUGE, -TINY, 0.8),
    "turn_is_per_decision": (-1.2, HUGE, -TINY, 0.8),
    # The bound moves with the anchor, and with it away from the sampler: (1 ± ε)·π̄/μ.
    "ewma_decoupled": (-1.2 * TINY, 1.0, -1.0, 0.8 * HUGE),
    "drpo": (0.5, -0.5, 0.5, -0.5),
}
RATIO_FREE = {"reinforce", "drpo"}
"""Losses that look at log π_θ alone."""
UNIFORM_SCORE = {"cispo", "dis"}
"""Losses whose gradient is a detached weight times that of log π_θ: it does not vanish with the clamp."""


def batch(log_ratio: float, advantage: float, lengths=(2, 0, 2)) -> Batch:
    """Sequences of turns of at most two decisions; every decision alike. Leaves carry gradients."""
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    turns = torch.unique(torch.cat((torch.arange(0, total, 2), offsets)))
    leaf = torch.zeros(total, requires_grad=True)
    full = torch.full((total,), advantage)
    return Batch(leaf + log_ratio, full, leaf - 1.0, offsets, turns)


def weighted(loss: torch.Tensor, offsets: torch.Tensor, rule="sequence_mean") -> torch.Tensor:
    counts, sizes = aggregation.count(offsets.diff())
    per_sequence = aggregation.sequence_weights(rule, offsets.diff(), counts, prompt_sizes=sizes)
    return aggregation.weighted_sum(loss, aggregation.decision_weights(per_sequence, offsets))


def gradients(total: torch.Tensor, b: Batch) -> torch.Tensor:
    found = torch.autograd.grad(total, [b.log_ratio, b.logprobs], allow_unused=True)
    return torch.stack([torch.zeros_like(b.log_ratio) if g is None else g for g in found]).sum(0)


@pytest.mark.parametrize("name", LOSSES)
def test_limits_of_the_log_ratio_are_the_documented_ones(name):
    found = []
    for log_ratio in (1e4, -1e4):
        for advantage in (1.0, -1.0):
            b = batch(log_ratio, advantage)
            loss = LOSSES[name](b)
            assert loss.shape == b.log_ratio.shape
            gradient = gradients(weighted(loss, b.offsets), b)
            assert torch.isfinite(gradient).all()
            if name not in RATIO_FREE | UNIFORM_SCORE | {"ewma_decoupled"}:
                assert torch.equal(gradient, torch.zeros_like(gradient))
            found.append(float(loss.detach()[0]))
    assert found == pytest.approx(LIMITS[name], rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [0.1, -0.1, 1e4, -1e4])
def test_zero_advantages_give_no_loss_and_no_gradient(name, log_ratio):
    b = batch(log_ratio, 0.0)
    total = weighted(LOSSES[name](b), b.offsets)
    assert total == 0
    assert torch.equal(gradients(total, b), torch.zeros(4))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [0.1, 1e4, -1e4])
def test_when_everything_is_rejected_the_loss_is_zero_and_differentiable(name, log_ratio):
    whole = batch(log_ratio, 1.0)
    positions, offsets = compact(torch.zeros(4, dtype=torch.bool), whole.offsets)
    turns = torch.zeros(1, dtype=torch.int64)
    kept = Batch(*(x[positions] for x in whole[:3]), offsets, turns)
    total = weighted(LOSSES[name](kept), offsets)
    assert total == 0
    assert torch.equal(gradients(total, whole), torch.zeros(4))
    assert aggregation.count(offsets.diff())[0].decisions == 0


@pytest.mark.parametrize("name", LOSSES)
def test_one_decision_equals_the_first_of_many(name):
    """With equal decisions a mean over a sequence is its first term; Turn-PPO multiplies two of a turn."""
    one, many = batch(0.05, 0.5, (1,)), batch(0.025 if name == "turn_ppo" else 0.05, 0.5, (100_000,))
    first, rest = weighted(LOSSES[name](one), one.offsets), weighted(LOSSES[name](many), many.offsets)
    share = 1e5 if name == "drpo" else 1.0  # each decision carries 1/J of its response's score
    torch.testing.assert_close(rest * share, first, rtol=1e-4, atol=0)
    gradient = gradients(rest, many)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(gradient, gradient[:1].expand(100_000))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_a_hundred_thousand_extreme_decisions(name, extreme):
    b = batch(extreme, -1.0, (100_000, 1))
    total = weighted(LOSSES[name](b), b.offsets, "token_mean")
    assert torch.isfinite(total)
    assert torch.isfinite(gradients(total, b)).all()


SCALAR = {
    # loss of one decision and its slope in log π_θ, from ℓ, A, log π by hand
    "reinforce": lambda x, a, lp: (-a * lp, -a),
    "sft": lambda x, a, lp: (-lp, -1.0),
    "cispo": lambda x, a, lp: (-min(math.exp(x), 1.2) * a * lp, -min(math.exp(x), 1.2) * a),
    "dual_clip": lambda x, a, lp: _dual(math.exp(x), a),
    "sapo": lambda x, a, lp: _sapo(math.exp(x), a),
    "dis": lambda x, a, lp: (-math.exp(x) * a * lp, -math.exp(x) * a) if 0.7 < math.exp(x) < 6 else (0.0, 0.0),
}


def _dual(ratio: float, a: float) -> tuple[float, float]:
    if a < 0 and ratio > 3:
        return -3 * a, 0.0
    if (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8):
        return -a * (1.28 if a > 0 else 0.8), 0.0
    return -a * ratio, -a * ratio


def _sapo(ratio: float, a: float) -> tuple[float, float]:
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a


@pytest.mark.parametrize("name", SCALAR)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_slope_of_a_decision_by_hand(name, seed):
    x, a, lp = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lp = -lp.abs()
    step = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    b = Batch(x * 1.5 + step, a, lp + step, torch.tensor([0, 40]), torch.tensor([0, 40]))
    loss = policy.sft(b.logprobs) if name == "sft" else LOSSES[name](b)
    (slope,) = torch.autograd.grad(loss.sum(), step)
    by_hand = [SCALAR[name](*(float(v) for v in row)) for row in zip(x * 1.5, a, lp, strict=True)]
    expected = torch.tensor(by_hand, dtype=torch.float64).T
    torch.testing.assert_close(torch.stack((loss.detach(), slope)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_gradient_equals_finite_differences(clip):
    values, returns, old = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value.value_loss(v, returns, old, clip)[0], values.requires_grad_())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_gradient_equals_finite_differences(estimator):
    lp, reference, mu = torch.randn(3, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    held = lp.clone()

    def loss(x):
        # k2 detaches its ratio: for a finite difference the ratio must stay where it is.
        return kl_loss(x, reference, estimator, (held if estimator == "k2" else x) - mu)

    assert torch.autograd.gradcheck(loss, lp.clone().requires_grad_())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_kl_loss_of_extreme_log_probs_is_finite(estimator, extreme):
    lp = torch.full((3,), extreme, requires_grad=True)
    kl_loss(lp, torch.zeros(3), estimator, lp - 0.0).sum().backward()
    assert torch.isfinite(lp.grad).all()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_of_extreme_values(clip):
    values = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    loss, _ = value.value_loss(values, torch.zeros(3), torch.zeros(3), clip)
    loss.sum().backward()
    assert loss.tolist() == [5e7, 5e7, 0.0]
    assert values.grad.tolist() == [1e4, -1e4, 0.0]


ESTIMATORS = {
    "gae": lambda r, o: advantages.gae(r, torch.zeros_like(r), o, gamma=1.0, lam_actor=0.95, bootstrap=_none(o))[0],
    "turn_gae": lambda r, o: advantages.turn_gae(
        r, torch.zeros_like(r), torch.arange(len(r) + 1), o, bootstrap=_none(o)
    )[0],
    "grpo": lambda r, o: groups.grpo(r, torch.zeros(len(r)).long()),
    "dr_grpo": lambda r, o: groups.dr_grpo(r, torch.zeros(len(r)).long()),
    "rloo": lambda r, o: groups.rloo(r, torch.zeros(len(r)).long()),
    "batch_mean": lambda r, o: groups.batch_mean_baseline(r),
    "whiten": lambda r, o: advantages.whiten(r),
    "evpo": lambda r, o: advantages.evpo(r, r, moments(r), moments(r))[0],
    "drpo": lambda r, o: groups.drpo_coefficients(r, r > 0, torch.ones(len(r)), torch.zeros(len(r)).long(),
                                                  max_length=10).score,
}  # fmt: skip
BASELINES = sorted(set(ESTIMATORS) - {"gae", "turn_gae"})


def _none(offsets: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(offsets) - 1)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("scale", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("size", [2, 100_000])
def test_estimators_are_finite(name, scale, size):
    rewards = scale * torch.randn(size, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(ESTIMATORS[name](rewards, torch.tensor([0, size // 2, size]))).all()


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("reward", [0.1, -0.7, 1e4])
def test_rewards_without_variance_give_exactly_no_advantage(name, reward):
    """Three times 0.1 over three is not 0.1."""
    found = ESTIMATORS[name](torch.full((3,), reward, dtype=torch.float64), torch.tensor([0, 3]))
    assert torch.equal(found, torch.zeros_like(found))


def test_one_response_has_no_advantage_over_itself():
    for name in ("grpo", "dr_grpo", "batch_mean", "whiten", "evpo", "drpo"):
        assert ESTIMATORS[name](torch.ones(1), torch.tensor([0, 1])).tolist() == [0.0]


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_corrections_of_extreme_ratios_reject_or_bound(extreme):
    x, offsets = torch.full((100_000,), extreme), torch.tensor([0, 1, 100_000])
    assert float(importance.truncated_weights(x, 2.0).max()) <= 2.0 + 1e-6
    assert not importance.icepop_weights(x).any()
    assert not importance.keep_sequences_by_mean(x, offsets, "k3", 0.1).any()
    assert not importance.keep_tokens(x, "k2", 0.1).any()
    assert importance.veto(x, offsets, 1e-4).tolist() == [extreme > 0] * 2
    for weights in (importance.geometric_weights(x, offsets), importance.icepop_weights(x)):
        size, share = importance.effective_sample_size(importance.sample_size_sums(weights))
        assert torch.isfinite(size) and 0 <= share <= 1 + 1e-12
