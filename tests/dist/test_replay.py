"""Exact replay: routes recorded on one rank and replayed on any layout give what native routing gives there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.dist import replay_cases as cases
from tests.dist.compare import gradient_errors
from tests.dist.layouts import BASELINE
from tests.dist.pool import RankFailure
from tests.dist.scenario import EMPTY_ROW, LENGTHS, MISSING_ROW, SHAPE, Layout

FAST = (
    Layout("recompute", 1, dict(recompute="full"), budget=40),
    Layout("tp2-pp2-ep2", 4, dict(tensor=2, pipeline=2, expert=2, recompute="full"), budget=40),
    Layout("cp2-ep2 selective", 2, dict(context=2, expert=2, recompute="selective")),
    Layout("pp2-vpp2", 2, dict(pipeline=2, virtual_pipeline=2, recompute="full"), budget=40),
)
SLOW = (
    Layout("dp2", 2, budget=40),
    Layout("ep4", 4, dict(expert=4, recompute="full")),
    Layout("tp2-etp2", 2, dict(tensor=2, expert_tensor=2)),
    Layout("tp2-cp2", 4, dict(tensor=2, context=2, recompute="full"), budget=40),
    Layout("pp4", 4, dict(pipeline=4), budget=26),
    Layout("padded", 1, packed=False, budget=48),
)
LAYOUTS = [pytest.param(layout, id=layout.name) for layout in FAST]
LAYOUTS += [pytest.param(layout, id=layout.name, marks=pytest.mark.full) for layout in SLOW]
TOLERANCE = 5e-6
"""Gates are the same bits: they are gathered at the ids that top-k would return. But padding goes to other experts,
whose matrix products then have other shapes and other rounding."""


@pytest.fixture(scope="module")
def routes(ranks, scenario) -> list[np.ndarray]:
    """Native routes of θ on one rank."""
    return ranks.run(cases.live_routes, 1, scenario, BASELINE)[0]


def distance(found: cases.Pass, expected: cases.Pass) -> tuple[float, float]:
    """Largest difference of log-probs, largest relative error of a router's gradient."""
    errors = gradient_errors(found.routers, expected.routers)
    return float((found.logprobs - expected.logprobs).abs().max()), max(errors.values())


def check_exact(ranks, scenario, layout: Layout, routes: list[np.ndarray]) -> dict[str, cases.Pass]:
    """Replayed equals native, permuted does not; every call was expected. Returns rank 0's passes."""
    batches = {
        "native": None,
        "replayed": cases.with_routes(scenario.batch, routes),
        "permuted": cases.with_routes(scenario.batch, cases.permuted_routes(routes)),
        "missing": cases.with_routes(scenario.batch, cases.missing_routes(routes)),
    }
    per_rank = ranks.run(cases.compare_routings, layout.world, scenario, layout, batches, timeout=300.0)
    for passes in per_rank:
        assert all(p.consumed == p.expected for p in passes.values())
    passes = per_rank[0]
    assert max(distance(passes["replayed"], passes["native"])) <= TOLERANCE
    moved, turned = distance(passes["permuted"], passes["native"])
    assert moved > 1e-2 and turned > 1e-2
    assert max(distance(passes["missing"], passes["native"])) <= TOLERANCE
    return passes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_equals_native(ranks, scenario, routes, layout: Layout) -> None:
    passes = check_exact(ranks, scenario, layout, routes)
    tokens = (sum(LENGTHS) - len(LENGTHS)) * SHAPE.num_layers
    assert passes["native"].missing == (0, 0)
    assert passes["replayed"].missing == (0, tokens)
    assert passes["missing"].missing == (tokens, tokens)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        pytest.param(replace(SHAPE, dense_layers=(0,)), {}, id="dense first layer"),
        pytest.param(replace(SHAPE, topk=1), {"norm_topk_prob": False}, id="top-1"),
    ],
)
def test_other_models(ranks, make_scenario, shape, settings) -> None:
    scenario = make_scenario(shape, **settings)
    (routes,) = ranks.run(cases.live_routes, 1, scenario, BASELINE)
    assert routes[0].shape == (4 - len(shape.dense_layers), LENGTHS[0] - 1, shape.topk)
    layout = Layout("", 2, dict(pipeline=2, recompute="full"), budget=48)
    passes = check_exact(ranks, scenario, layout, routes)
    assert len(passes["native"].routers) == len(routes[0])


def test_a_row_acts_on_later_tokens_only(ranks, scenario, routes) -> None:
    row, token = 2, 8
    changed = cases.altered_token(routes, row, token)
    batches = {"as recorded": routes, "altered": changed}
    batches = {name: cases.with_routes(scenario.batch, r) for name, r in batches.items()}
    (passes,) = ranks.run(cases.compare_routings, 1, scenario, BASELINE, batches)
    moved = (passes["altered"].logprobs - passes["as recorded"].logprobs).numpy()
    positions = np.flatnonzero(scenario.batch.action_mask)
    start = scenario.batch.offsets[row]
    mine = (positions >= start) & (positions < scenario.batch.offsets[row + 1])
    before = ~mine | (positions <= start + token)
    assert np.all(moved[before] == 0)
    assert np.abs(moved[~before]).max() > 1e-3


def test_routes_of_the_actor_never_reach_the_critic(ranks, scenario) -> None:
    other = cases.with_routes(scenario.batch, cases.other_routes(scenario.batch, 1))
    batches = [scenario.batch, other]
    assert not np.array_equal(batches[0].routes[0], batches[1].routes[0])
    layout = Layout("", 2, dict(pipeline=2))
    first, second = ranks.run(cases.critic_values, 2, scenario, layout, batches)[0]
    assert first.abs().max() > 0.1 and np.array_equal(first.numpy(), second.numpy())


@pytest.mark.parametrize("layout", [Layout("", 1, budget=48), Layout("", 4, dict(tensor=2, context=2), budget=48)])
def test_every_token_goes_to_k_experts(ranks, scenario, layout: Layout) -> None:
    """Padding rows hold distinct ids: with repeated ones the map of a token would have fewer experts."""
    for calls in ranks.run(cases.routing_maps, layout.world, scenario, layout):
        assert calls and all(chosen == SHAPE.topk * tokens for tokens, chosen in calls)


def test_missing_row_of_the_experiment_is_counted(ranks, scenario) -> None:
    (passes,) = ranks.run(cases.compare_routings, 1, scenario, BASELINE, {"recorded": scenario.batch})
    assert passes["recorded"].missing[0] == 1 and MISSING_ROW != EMPTY_ROW


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (cases.unconsumed_rows, "recorded routes were not consumed"),
        (cases.missed_micro_batch, "not called once per micro-batch"),
        (cases.stray_recompute, "recomputed without a forward of ours"),
        (cases.misshapen_rows, "do not fit the router's input"),
    ],
)
def test_leaks_are_refused(ranks, scenario, case, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        ranks.run(case, 1, scenario, BASELINE)
