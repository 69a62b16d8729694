"""Layout invariance: the same batch and weights give the same step, however they are spread over ranks.

Two optimizer steps of actor and critic with every term of the objective on (dual clip, value clip, sequence importance
weights, KL, entropy, load-balancing and z-loss, replay with a missing row, an EWMA anchor) are compared with one rank,
one micro-batch, float32: bounds in `compare.Bounds`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from tests.dist import experiment
from tests.dist.compare import Bounds, branches, errors, violations
from tests.dist.layouts import BASELINE, FAST, SLOW, SWITCHES
from tests.dist.scenario import ALGORITHM, EMPTY_ROW, LENGTHS, OPTIMIZER, SECOND_STEP, Layout, complete_routes

LAYOUTS = [pytest.param(layout, id=layout.name) for layout in FAST] + [
    pytest.param(layout, id=layout.name, marks=pytest.mark.full) for layout in SLOW
]
OBJECTIVES = {
    "decoupled": dict(importance="none", policy=dict(clip_low=0.2, clip_high=0.25),
                      reference_kl=dict(name="loss", coef=0.1, estimator="k2")),
    "recompute": dict(anchor="recompute", importance=dict(name="token", cap=1.1), aggregation="prompt_mean",
                      reference_kl=dict(name="reward", coef=0.1)),
    "behaviour": dict(anchor="behaviour", importance="none", aggregation="token_mean",
                      reference_kl=dict(name="loss", coef=0.1, estimator="k1")),
    "removed": dict(anchor="recompute", importance=dict(name="turn", cap=1.3, normalise=True), likelihood_coef=0.1,
                    rejection=dict(unit="token", max=0.02), value=dict(clip=0.2, aggregation="token_mean"),
                    reference_kl="none"),
    "constant": dict(aggregation=dict(name="constant", constant=150.0), router_losses=dict(z_coef=0.003),
                     estimator=ALGORITHM["estimator"] | dict(whiten=False), value={}),
}  # fmt: skip
BF16_SPACING = 2**-7 / OPTIMIZER["lr"]
"""Of bfloat16 just above 1, where norm weights are, in learning rates."""
BF16_BOUNDS = Bounds(logprob=0.15, scalar=0.09, gradient=0.3, floor=0.1, norm=0.05, weight=1.01 * BF16_SPACING)
"""bfloat16 keeps 8 bits, and rounding depends on where a sum is cut. A ratio may cross the edge of a clip, which
changes the gradient of whole decisions: hence 0.3. It moves the clipped share by a thirtieth, 0.04 of the terms' size:
two may."""


def run(ranks, scenario, layout: Layout) -> experiment.Result:
    """Rank 0's result; the numbers every rank hands back are the same bits."""
    results = ranks.run(experiment.two_steps, layout.world, scenario, layout, timeout=300.0)
    for other in results[1:]:
        assert other.metrics == results[0].metrics
        for ours, theirs in zip(other.steps, results[0].steps, strict=True):
            assert ours.metrics == theirs.metrics and ours.z == theirs.z
    return results[0]


def test_experiment_reaches_every_branch_and_no_edge(scenario, baseline) -> None:
    shares, edge = branches(baseline, scenario.batch, ALGORITHM)
    assert all(0.1 <= share <= 0.4 for share in shares.values()), shares
    assert edge > 1e-4
    assert all(step.margin > 1e-4 for step in baseline.steps), [step.margin for step in baseline.steps]


def test_experiment_has_every_term(scenario, baseline) -> None:
    for step in baseline.steps:
        metrics = step.metrics
        assert metrics["actor/stepped"] == metrics["critic/stepped"] == metrics["actor/micro_batches"] == 1
        assert metrics["is/sequence_capped"] > 0 and metrics["actor/kl"] > 0.01 and metrics["actor/entropy"] > 0.1
        for name in ("actor/aux_loss", "actor/z_loss", "critic/aux_loss", "critic/z_loss", "critic/clipped"):
            assert metrics[name] > 0.05, name
        assert metrics["actor/grad_norm"] > OPTIMIZER["clip_grad"], "clipping is not reached"
        policies = [step.readings[name] for name in ("theta", "anchor", "reference")]
        assert all((a - b).abs().max() > 0.1 for a, b in combinations(policies, 2))
    assert baseline.steps[0].metrics["replay/missing"] == 1 / ((sum(LENGTHS) - len(LENGTHS) - 5 + 1) * 4)
    decisions = np.diff(np.concatenate([[0], np.cumsum(scenario.batch.action_mask)])[scenario.batch.offsets])
    assert decisions[EMPTY_ROW] == 0 and len(SECOND_STEP) < 4 and baseline.steps[1].z > baseline.steps[0].z > 1


def test_fast_layouts_cover_every_pair_of_switches() -> None:
    for first, second in combinations(SWITCHES, 2):
        assert any(SWITCHES[first](layout) and SWITCHES[second](layout) for layout in FAST), (first, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(ranks, scenario, baseline, keep_errors, layout: Layout) -> None:
    result = run(ranks, scenario, layout)
    worst = errors(result, baseline, OPTIMIZER["lr"])
    keep_errors(layout.name, worst)
    assert violations(worst, Bounds()) == {}


def test_budgets_give_one_two_and_five_micro_batches(ranks, scenario) -> None:
    counts = [ranks.run(experiment.micro_batches, 1, scenario, Layout("", budget=b))[0] for b in (256, 48, 21)]
    assert counts == [1, 2, 5]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "decoupled" else pytest.mark.full) for n in OBJECTIVES]
)
def test_objective(ranks, scenario, keep_errors, name: str) -> None:
    plain = Layout(f"{name} 1 rank", parallel=BASELINE.parallel, algorithm=OBJECTIVES[name])
    spread = Layout(name, 4, FAST[0].parallel, FAST[0].budget, algorithm=OBJECTIVES[name])
    worst = errors(run(ranks, scenario, spread), run(ranks, scenario, plain), OPTIMIZER["lr"])
    keep_errors(f"objective {name}", worst)
    assert violations(worst, Bounds()) == {}


def test_bfloat16_layout(ranks, scenario, keep_errors) -> None:
    """Only the actor, every row replayed: native routes flip where rounding moves a router logit."""
    scenario = replace(scenario, batch=complete_routes(scenario.batch))
    plain = Layout("bf16", parallel=BASELINE.parallel, dtype="bfloat16")
    spread = Layout("bf16", 4, dict(tensor=2, pipeline=2, expert=2), 48, dtype="bfloat16")
    found, expected = (experiment.actor_only(run(ranks, scenario, layout)) for layout in (spread, plain))
    worst = errors(found, expected, OPTIMIZER["lr"], BF16_BOUNDS.floor)
    keep_errors("tp2-pp2-ep2 bf16", worst)
    assert violations(worst, BF16_BOUNDS) == {}
