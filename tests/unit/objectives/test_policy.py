"""Policy losses against autograd of the slow form, finite differences, and extreme inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RolloutError
from megatron_rl.objectives import policy
from megatron_rl.objectives.segments import repeat, segment_mean

OFFSETS = torch.tensor([0, 3, 3, 7, 8])
TURNS = torch.tensor([0, 1, 3, 7, 8])


def sample(seed: int = 0, size: int = 8, spread: float = 0.6):
    """(log-ratios, advantages, log-probs), float64, away from the kinks with probability one."""
    generator = torch.Generator().manual_seed(seed)
    x, a, lp = torch.randn(3, size, generator=generator, dtype=torch.float64)
    return x * spread, a, -lp.abs() - 0.1


def per_sequence(values: torch.Tensor, offsets: torch.Tensor = OFFSETS) -> torch.Tensor:
    return segment_mean(values, offsets)


LOSSES = {
    "reinforce": lambda x, a, lp: policy.reinforce(lp, a),
    "sft": lambda x, a, lp: policy.sft(lp),
    "ppo_clip": lambda x, a, lp: policy.ppo_clip(x, a, 0.2, 0.28).loss,
    "dual_clip": lambda x, a, lp: policy.dual_clip(policy.ppo_clip(x, a, 0.2, 0.28), a).loss,
    "gspo": lambda x, a, lp: policy.gspo(x, per_sequence(a), OFFSETS, 0.1, 0.1).loss,
    "gspo_token": lambda x, a, lp: policy.gspo_token(x, a, OFFSETS, 0.1, 0.1).loss,
    "gmpo": lambda x, a, lp: policy.gmpo(x, per_sequence(a), OFFSETS).loss,
    "cispo": lambda x, a, lp: policy.cispo(x, lp, a, clip_high=0.2).loss,
    "sapo": lambda x, a, lp: policy.sapo(x, a),
    "dis": lambda x, a, lp: policy.dis(x, lp, a).loss,
    "turn_ppo": lambda x, a, lp: policy.turn_ppo(x, per_sequence(a, TURNS), TURNS).loss,
    "turn_is": lambda x, a, lp: policy.turn_is(x, per_sequence(a, TURNS), TURNS).loss,
    "turn_is_per_decision": lambda x, a, lp: policy.turn_is_per_decision(x, a, TURNS).loss,
    "ewma_decoupled": lambda x, a, lp: policy.ewma_decoupled(lp, lp.detach() - x.detach(), lp.detach() + 0.3, a).loss,
    "drpo": lambda x, a, lp: policy.drpo(lp, per_sequence(a), OFFSETS.diff(), OFFSETS),
}


def ppo(ratio, a, low, high):
    """The textbook form, with both branches."""
    return torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)


def slow(name: str, x, a, lp):
    """Loss of one segment `[n]` by the definition, in Python over segments."""
    sign = a.mean().sign()
    forms = {
        "ppo_clip": lambda: ppo(x.exp(), a, 0.2, 0.28),
        "gspo": lambda: ppo(x.mean().exp(), a.mean(), 0.1, 0.1)[None],
        "gspo_token": lambda: ppo(x.mean().exp().detach() * lp.exp() / lp.exp().detach(), a, 0.1, 0.1),
        "gmpo": lambda: (-a.mean() * torch.minimum(sign * x, sign * x.clamp(-0.4, 0.4)).mul(sign).mean().exp())[None],
        "turn_ppo": lambda: ppo(x.sum().exp(), a.mean(), 0.2, 0.2)[None],
        "turn_is": lambda: ppo(x.mean().exp(), a.mean(), 0.2, 0.2)[None],
        "turn_is_per_decision": lambda: ppo(x.mean().exp(), a, 0.2, 0.2),
        "drpo": lambda: -a.mean() * lp / len(lp),
    }
    return forms[name]()


@pytest.mark.parametrize(
    "name", ["ppo_clip", "gspo", "gspo_token", "gmpo", "turn_ppo", "turn_is", "turn_is_per_decision", "drpo"]
)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_equal_the_slow_form(name, seed):
    x, a, lp = sample(seed)
    bounds = (TURNS if name.startswith("turn") else OFFSETS).tolist()
    gradients, values = [], []
    for fast in (True, False):
        step = torch.zeros_like(x, requires_grad=True)
        moved, moved_lp = x + step, lp + step
        if fast:
            loss = LOSSES[name](moved, a, moved_lp)
            if name in ("gspo", "gmpo"):  # an empty sequence has a loss that no decision carries
                loss = loss[OFFSETS.diff() > 0]
        else:
            pairs = [(s, e) for s, e in zip(bounds[:-1], bounds[1:], strict=True) if e > s]
            loss = torch.cat([slow(name, moved[s:e], a[s:e], moved_lp[s:e]) for s, e in pairs])
        (loss * torch.linspace(1, 2, loss.numel(), dtype=torch.float64)).sum().backward()
        values.append(loss.detach())
        gradients.append(step.grad)
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["ppo_clip", "dual_clip", "gspo", "gmpo", "sapo", "turn_ppo", "turn_is", "turn_is_per_decision"]
)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(name, seed):
    x, a, lp = sample(seed)
    assert torch.autograd.gradcheck(lambda v: LOSSES[name](v, a, lp), x.requires_grad_())


def test_dis_gradient_is_that_of_the_undetached_ratio():
    x, a, lp = sample(3, 200, 1.5)
    step = torch.zeros_like(x, requires_grad=True)
    policy.dis(x + step, lp + step, a).loss.sum().backward()
    other = torch.zeros_like(x, requires_grad=True)
    ratio = (x + other).exp()
    torch.where((ratio > 0.7) & (ratio < 6.0), -ratio * a, 0.0).sum().backward()
    torch.testing.assert_close(step.grad, other.grad)


@pytest.mark.parametrize("seed", range(3))
def test_ewma_gradient_equals_finite_differences_with_the_cap_held(seed):
    _, a, lp = sample(seed)
    anchor, behaviour = lp + 0.5 * torch.randn(8).double(), lp - 1 + torch.randn(8).double()
    behaviour[0] = lp[0] - 9.0
    step = torch.zeros_like(lp, requires_grad=True)
    policy.ewma_decoupled(lp + step, anchor, behaviour, a).loss.sum().backward()
    capped = torch.maximum(behaviour, lp - math.log(100))

    def held(v: float, j: int) -> float:
        ratio, scale = math.exp(lp[j] + v - anchor[j]), math.exp(anchor[j] - capped[j])
        return -min(ratio * a[j], min(max(ratio, 0.8), 1.2) * a[j]) * scale

    slope = [(held(1e-6, j) - held(-1e-6, j)) / 2e-6 for j in range(8)]
    torch.testing.assert_close(step.grad, torch.tensor(slope, dtype=torch.float64), rtol=1e-6, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_clipped_means_no_gradient(seed):
    x, a, _ = sample(seed, 32, 1.0)
    x.requires_grad_()
    for result in (policy.ppo_clip(x, a, 0.2, 0.28), policy.dual_clip(policy.ppo_clip(x, a, 0.2, 0.28), a, 1.5)):
        (gradient,) = torch.autograd.grad(result.loss.sum(), x)
        assert torch.equal(result.clipped, gradient == 0)
        assert not (result.clipped_low & result.clipped_high).any()


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    x, a = torch.tensor([3.0, 3.0, -3.0]), torch.tensor([-2.0, 2.0, -2.0])
    plain = policy.ppo_clip(x, a)
    bounded = policy.dual_clip(plain, a, 3.0)
    torch.testing.assert_close(bounded.loss, torch.tensor([6.0, -2.4, 1.6]))
    assert bounded.clipped_high.tolist() == [True, True, False]
    assert bounded.clipped_low.tolist() == [False, False, True]


def test_gspo_token_has_the_value_of_the_sequence_ratio():
    x, a, _ = sample(1)
    shared = repeat(per_sequence(a), OFFSETS)
    token = policy.gspo_token(x, shared, OFFSETS, 0.1, 0.1).loss
    torch.testing.assert_close(token, repeat(policy.gspo(x, per_sequence(a), OFFSETS, 0.1, 0.1).loss, OFFSETS))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "turn_ppo", "turn_is", "turn_is_per_decision", "drpo"])
def test_a_sequence_split_over_ranks_has_the_same_loss_and_gradient(name):
    """Even and odd decisions on two ranks: each puts its part in its slots of a step-wide vector, and parts are added.

    The loss of the sum is differentiated once; each rank then minimises Σ c_j log π_θ(a_j) over its own decisions.
    """
    x, a, lp = sample(5)

    def total(moved: torch.Tensor) -> torch.Tensor:
        loss = LOSSES[name](x + moved, a, lp + moved)
        per_decision = loss if len(loss) == 8 else repeat(loss, TURNS if name.startswith("turn") else OFFSETS)
        return (per_decision * torch.arange(8)).sum()

    whole = torch.linspace(-0.1, 0.1, 8, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(total(whole), whole)
    slots = [torch.arange(rank, 8, 2) for rank in (0, 1)]
    parts = [whole.detach()[own].requires_grad_() for own in slots]
    gathered = sum(torch.zeros(8).double().index_put((own,), p.detach()) for own, p in zip(slots, parts, strict=True))
    gathered.requires_grad_()
    loss = total(gathered)
    (coefficients,) = torch.autograd.grad(loss, gathered)
    assert torch.equal(loss, total(whole))
    for own, part in zip(slots, parts, strict=True):
        (coefficients[own] * part).sum().backward()
        assert torch.equal(part.grad, expected[own])


@pytest.mark.parametrize("name", ["gspo", "gmpo", "turn_ppo", "turn_is"])
def test_sequences_apart_have_the_loss_and_gradient_they_have_together(name):
    """Sequences 0-1 and 2-3 in two micro-batches: no value crosses from one sequence to another."""
    x, a, _ = sample(5)
    function, advantages = getattr(policy, name), per_sequence(a)
    x.requires_grad_()
    whole = function(x, advantages, OFFSETS).loss
    parts = [function(x[:3], advantages[:2], OFFSETS[:3]).loss, function(x[3:], advantages[2:], OFFSETS[2:] - 3).loss]
    assert torch.equal(torch.cat(parts), whole)
    weights = torch.arange(1, 5)
    (expected,) = torch.autograd.grad((whole * weights).sum(), x)
    (found,) = torch.autograd.grad((parts[0] * weights[:2]).sum() + (parts[1] * weights[2:]).sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extreme", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_give_finite_losses_and_gradients(name, extreme, dtype):
    step = torch.zeros(8, requires_grad=True)
    a = torch.tensor([1.0, -1.0, 0.0, 2.0, -2.0, 0.5, -0.5, 1.0])
    loss = LOSSES[name]((extreme + step).to(dtype), a, (-abs(extreme) + step).to(dtype))
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(step.grad).all()


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo_token", "turn_is_per_decision", "sapo"])
def test_beyond_the_clamp_the_gradient_is_zero(name):
    x = torch.full((8,), 25.0, requires_grad=True)
    LOSSES[name](x, torch.full((8,), -1.0), torch.zeros(8)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(8))


def test_the_clamp_acts_after_the_segment_sum():
    x = torch.tensor([30.0, -29.9])
    found = policy.turn_ppo(x, torch.ones(1), torch.tensor([0, 2])).loss
    torch.testing.assert_close(found, torch.tensor([-math.exp(0.1)]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"drpo"}))
def test_no_decisions(name, monkeypatch):
    import sys

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "OFFSETS", torch.zeros(3, dtype=torch.int64))
    monkeypatch.setattr(module, "TURNS", torch.zeros(1, dtype=torch.int64))
    x = torch.zeros(0, requires_grad=True)
    advantages = torch.zeros(0)
    monkeypatch.setattr(module, "per_sequence", lambda a, offsets=module.OFFSETS: torch.zeros(len(offsets) - 1))
    loss = LOSSES[name](x, advantages, x)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert x.grad is None or x.grad.shape == (0,)


def test_one_decision():
    one = torch.tensor([0, 1])
    x, a = torch.tensor([0.1], requires_grad=True), torch.ones(1)
    expected = policy.ppo_clip(x, a).loss
    for found in (policy.turn_ppo(x, a, one), policy.turn_is(x, a, one), policy.gspo(x, a, one, 0.2, 0.2)):
        torch.testing.assert_close(found.loss, expected)


def test_gmpo_of_a_zero_advantage_is_zero():
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = policy.gmpo(x, torch.zeros(1), torch.tensor([0, 2])).loss
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert x.grad.tolist() == [0.0, 0.0]


def test_a_sequence_advantage_is_not_broadcast_over_decisions():
    with pytest.raises(RolloutError, match="advantages"):
        policy.ppo_clip(torch.zeros(4), torch.zeros(1))
    with pytest.raises(RolloutError):
        policy.gspo(torch.zeros(4), torch.zeros(1), torch.tensor([0, 2, 4]))


def test_clipping_bias_surrogate_has_the_gradient_of_the_definition():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    lp = logits.log_softmax(-1)[torch.arange(6), torch.arange(6) % 5]
    x = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.1, 2.0], dtype=torch.float64)
    a = torch.tensor([0.5, -0.5, 1.5, -1.5, 1.0, 0.0], dtype=torch.float64)
    result = policy.ppo_clip(x, a)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    surrogate = policy.clipping_bias_surrogate(result, x, a, lp)
    (found,) = torch.autograd.grad((weights * surrogate).sum(), logits, retain_graph=True)
    expected = torch.zeros_like(logits)
    for j in range(6):
        if (x[j].exp() > 1.2 and a[j] > 0) or (x[j].exp() < 0.8 and a[j] < 0):
            (score,) = torch.autograd.grad(lp[j], logits, retain_graph=True)
            expected += x[j].exp() * a[j] * score / 6
    assert result.clipped.tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(found, expected)
    assert found.norm() <= policy.clipping_bias_bound(result, x, a, lp.detach(), weights)


def test_clipping_bias_divisor_never_amplifies():
    norms = torch.tensor([0.0, 0.5, 3.0])
    assert policy.clipping_bias_divisor(norms).tolist() == [1.0, 1.0, 3.0]


def test_nothing_clipped_has_no_bias():
    x, a, lp = torch.zeros(3), torch.ones(3), torch.full((3,), -1e4)
    result = policy.ppo_clip(x, a)
    assert policy.clipping_bias_bound(result, x, a, lp, torch.ones(3)) == 0
    assert torch.equal(policy.clipping_bias_surrogate(result, x, a, lp), torch.zeros(3))
