"""KL estimators: exact expectations and gradients over a small vocabulary, and logits at their limits."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.objectives import divergence

THETA, REFERENCE, SAMPLER = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def exact_gradient() -> torch.Tensor:
    theta = THETA.clone().requires_grad_()
    p = theta.softmax(-1)
    (gradient,) = torch.autograd.grad((p * (p.log() - REFERENCE.log_softmax(-1))).sum(), theta)
    return gradient


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_is_that_of_the_divergence(estimator, on_policy):
    """The expectation over the sampler is taken exactly, over the whole vocabulary."""
    theta = THETA.clone().requires_grad_()
    log_p = theta.log_softmax(-1)
    log_mu = log_p.detach() if on_policy else SAMPLER.log_softmax(-1)
    loss = divergence.kl_loss(log_p, REFERENCE.log_softmax(-1), estimator, log_p - log_mu)
    (log_mu.exp() * loss).sum().backward()
    torch.testing.assert_close(theta.grad, exact_gradient(), rtol=1e-9, atol=1e-12)


def test_k2_needs_no_ratio_on_policy_and_the_others_do():
    theta = THETA.clone().requires_grad_()
    log_p = theta.log_softmax(-1)
    (log_p.detach().exp() * divergence.kl_loss(log_p, REFERENCE.log_softmax(-1), "k2")).sum().backward()
    torch.testing.assert_close(theta.grad, exact_gradient(), rtol=1e-9, atol=1e-12)
    for estimator in ("k1", "k3"):
        with pytest.raises(ConfigError, match="ratio"):
            divergence.kl_loss(log_p, REFERENCE, estimator)


def test_estimators_have_the_expectation_they_claim():
    log_p, log_q = THETA.log_softmax(-1), REFERENCE.log_softmax(-1)
    exact = divergence.categorical_kl(THETA, REFERENCE)
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((log_p.exp() * divergence.estimate(log_p - log_q, estimator)).sum(), exact)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_finite_differences(estimator):
    x = THETA.log_softmax(-1).detach().requires_grad_()
    held = SAMPLER.log_softmax(-1)
    if estimator == "k2":
        assert torch.autograd.gradcheck(lambda v: divergence.kl_loss(v, held, "k2"), x)
    else:
        assert torch.autograd.gradcheck(lambda v: divergence.kl_loss(v, held, estimator, v - 0.5 * held), x)


def test_k3_keeps_its_digits_near_zero_and_never_overflows():
    d = torch.tensor([1e-9, 1e4, -1e4], dtype=torch.float64, requires_grad=True)
    k3 = divergence.estimate(d, "k3")
    k3.sum().backward()
    torch.testing.assert_close(k3[0].detach() * 1e18, torch.tensor(0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.isfinite(k3).all()
    assert torch.isfinite(d.grad).all()


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_loss_terms_are_finite_at_extremes(extreme):
    for estimator in ("k1", "k2", "k3"):
        x = torch.tensor([extreme], requires_grad=True)
        loss = divergence.kl_loss(x, torch.zeros(1), estimator, x)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(x.grad).all()


def test_impossible_tokens_add_nothing_forward_or_backward():
    logits = torch.tensor([[1.0, float("-inf"), 2.0]], requires_grad=True)
    reference = torch.tensor([[0.5, float("-inf"), 0.0]])
    total = divergence.categorical_entropy(logits) + divergence.categorical_kl(logits, reference)
    total.sum().backward()
    assert torch.isfinite(total).all()
    assert torch.isfinite(logits.grad).all()
    narrow = divergence.categorical_entropy(logits[:, ::2].detach())
    torch.testing.assert_close(divergence.categorical_entropy(logits.detach()), narrow)
    assert divergence.categorical_kl(reference, torch.tensor([[0.0, 0.0, float("-inf")]])).isinf().all()


def test_temperature_divides_logits():
    torch.testing.assert_close(divergence.categorical_entropy(THETA, 2.0), divergence.categorical_entropy(THETA / 2))
    torch.testing.assert_close(
        divergence.categorical_kl(THETA, REFERENCE, 2.0), divergence.categorical_kl(THETA / 2, REFERENCE / 2)
    )


def test_entropy_of_a_uniform_and_of_a_certain_distribution():
    assert divergence.categorical_entropy(torch.tensor([1e4, 0.0, -1e4])) == 0
    torch.testing.assert_close(divergence.categorical_entropy(torch.zeros(8)), torch.tensor(8.0).log())
