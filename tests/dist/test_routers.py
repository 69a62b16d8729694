"""One router by itself: gates under replay for every score function, router losses, native counts, refused settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigError

TOKENS, HIDDEN, EXPERTS, TOPK = 12, 16, 8, 2
ROUTERS = {
    "softmax after top-k": {},
    "softmax before top-k": dict(moe_router_pre_softmax=True),
    "sigmoid": dict(moe_router_score_function="sigmoid"),
    "sigmoid with expert bias": dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    "group-limited": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
    ),
    "top-1": dict(moe_router_topk=1, moe_router_pre_softmax=True),
}


def make_registry(settings: dict):
    """A registry over one chunk with one router, whose weights and expert bias are random."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_rl.backend.replay import RouteRegistry

    defaults = dict(moe_router_topk=TOPK, moe_router_load_balancing_type="none", add_bias_linear=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_dtype="fp32",
        use_cpu_initialization=True, **(defaults | settings),
    )  # fmt: skip
    world = dist.group.WORLD
    router = TopKRouter(config, SimpleNamespace(tp=world, cp=world, tp_cp=world, tp_dp_cp=world))
    with torch.no_grad():
        router.weight.normal_()
        if router.expert_bias is not None:
            router.expert_bias.normal_(std=0.3)
    layer = SimpleNamespace(mlp=SimpleNamespace(router=router), layer_number=1)
    return RouteRegistry([SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))]), router


def route(registry, router, routes, real=None, aux_weights=None, losses=None):
    """Gates [tokens, experts], the map, and the router's gradient of Σ gates·weights."""
    from megatron_rl.backend.replay import RouterRows

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    weights = torch.randn(TOKENS, EXPERTS, generator=generator)
    real = torch.ones(TOKENS, dtype=torch.bool) if real is None else real
    rows = RouterRows(None if routes is None else {0: routes}, real, aux_weights)
    router.weight.grad = None
    with registry.step(training=True, losses=losses, record=True), registry.forward(0, rows):
        gates, chosen = router(hidden)
        (gates * weights).sum().backward()
    return gates.detach(), chosen, router.weight.grad.clone(), hidden[:, 0]


def replay_equals_native(settings: dict) -> dict[str, float]:
    """Distances of replayed from native gates and gradients, and of other ids' gates."""
    registry, router = make_registry(settings)
    gates, chosen, gradient, _ = route(registry, router, None)
    ids = registry.handles[0].recorded
    again, map_again, gradient_again, _ = route(registry, router, ids.flip(1))
    agreed = registry.handles[0].agreed.tolist()
    other, other_map, _, _ = route(registry, router, (ids + 1) % EXPERTS)
    missing, _, _, _ = route(registry, router, torch.full_like(ids, -1))
    expected_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, (ids + 1) % EXPERTS, True)
    return dict(
        gates=float((again - gates).abs().max()),
        gradient=float((gradient_again - gradient).abs().max() / gradient.abs().max()),
        map=float((map_again != chosen).sum() + (other_map != expected_map).sum()),
        missing=float((missing - gates).abs().max()),
        moved=float((other - gates).abs().max()),
        disagreed=agreed[1] - agreed[0],
        outside=float(torch.where(other_map, 0.0, other).abs().max()),
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_replayed_gates_equal_native_ones(ranks, name: str) -> None:
    (found,) = ranks.run(replay_equals_native, 1, ROUTERS[name])
    assert found.pop("moved") > 1e-3
    assert max(found.values()) <= 1e-6, found


def losses_against_formula(score_function: str) -> dict[str, float]:
    """Errors of the attached losses' sums and gradient against autograd through the formulas, in float64."""
    from megatron_rl.backend.replay import RouterLosses

    registry, router = make_registry(dict(moe_router_score_function=score_function))
    real = torch.arange(TOKENS) % 4 != 0
    aux_weights = torch.where(real, 1 / 9, 0.0)
    shares = torch.tensor([0.3, 0.1, 0.1, 0.2, 0.05, 0.05, 0.1, 0.1])
    plain = route(registry, router, None, real)[2]
    settings = RouterLosses(0.5, 0.25, {0: shares})
    _, _, gradient, hidden = route(registry, router, None, real, aux_weights, settings)
    weight = router.weight.detach().double().requires_grad_()
    logits = hidden[real].double() @ weight.T
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    probs = scores / scores.sum(-1, keepdim=True)
    aux = EXPERTS * (probs.mean(0) * shares.double()).sum()
    z = logits.logsumexp(-1).square().mean()
    (0.5 * aux + 0.25 * z).backward()
    sums = registry.handles[0].losses
    added = (gradient - plain).double()
    return dict(
        aux=abs(float(sums[0] - aux.detach())),
        z=abs(float(sums[1] - z.detach())) / float(z.detach()),
        gradient=float((added - weight.grad).norm() / weight.grad.norm()),
    )


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_router_losses_equal_their_formulas(ranks, score_function: str) -> None:
    """aux = E·Σ_e f_e·mean_t p_te over recorded tokens, z = mean_t logsumexp²."""
    (found,) = ranks.run(losses_against_formula, 1, score_function)
    assert max(found.values()) < 1e-5, found


def native_load() -> tuple[list[float], list[float]]:
    """The handle's count, and the count by hand, of tokens that are not padding."""
    registry, router = make_registry({})
    real = torch.arange(TOKENS) % 3 != 0
    _, chosen, _, _ = route(registry, router, None, real)
    return registry.handles[0].load.tolist(), chosen[real].sum(0).double().tolist()


def test_padding_is_in_no_count(ranks) -> None:
    ((found, expected),) = ranks.run(native_load, 1)
    assert found == expected and sum(found) == 8 * TOPK


def refusal(settings: dict) -> ConfigError:
    """The error that building a registry raises."""
    try:
        make_registry(settings)
    except ConfigError as error:
        return error
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_input_jitter_eps", 0.1),
        ("moe_router_force_load_balancing", True),
    ],
)
def test_routers_that_cannot_be_replayed_are_refused(ranks, name: str, value) -> None:
    (error,) = ranks.run(refusal, 1, {name: value})
    assert error.setting == name and name in str(error)
