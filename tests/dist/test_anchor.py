"""Other weights in the live model: bfloat16 keeps float32 main weights, and swapping changes neither by a bit."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from megatron_rl.backend.anchor import main_weights
from megatron_rl.backend.step import train
from megatron_rl.training.actor_critic import ActorCritic
from megatron_rl.training.forward import prepare, sampling_readout, streams
from tests.dist import experiment
from tests.dist import replay_cases as cases
from tests.dist.layouts import BASELINE
from tests.dist.scenario import Layout

LAYOUTS = (
    Layout("1 rank", 1, BASELINE.parallel, dtype="bfloat16"),
    Layout("dp2 distributed optimizer", 2, dtype="bfloat16"),
    Layout("tp2-pp2-ep2", 4, dict(tensor=2, pipeline=2, expert=2), dtype="bfloat16"),
    Layout("dp2 float32", 2),
)


def swap(scenario, layout: Layout) -> dict[str, bool]:
    """What holds inside and after two swaps, the second left by an exception."""
    models = experiment.start(scenario, layout)
    take_a_step(models, scenario)
    live = [parameter for chunk in models.actor.model.bare for parameter in chunk.parameters()]
    mains = main_weights(models.actor)
    before = [t.detach().clone() for t in (*live, *mains)]
    with models.anchor.swapped_in():
        shown = experiment.whole(models.actor.model)
        mains_inside = [main.detach().clone() for main in mains]
    with contextlib.suppress(KeyError), models.reference.swapped_in():
        raise KeyError
    after = [t.detach().clone() for t in (*live, *main_weights(models.actor))]
    experiment.load(models.actor, scenario.checkpoints["anchor"])
    expected = experiment.whole(models.actor.model)
    apart = layout.dtype == "bfloat16"
    return dict(
        shows_the_average=all(torch.equal(shown[name], weight) for name, weight in expected.items()),
        restored=_same(before, after),
        main_untouched=not apart or _same(mains_inside, before[len(live) :]),
        main_off_the_grid=not apart or any((m != m.bfloat16().float()).any() for m in before[len(live) :]),
    )


def take_a_step(models: ActorCritic, scenario) -> None:
    """Main weights leave the bfloat16 grid."""
    rows, stream = np.arange(len(scenario.batch)), streams(scenario.batch)[0]
    made = prepare(models, models.actor.model, stream, scenario.batch, rows, replay=True)
    train(models.actor.model, made.micro_batches, made.plan.length, sampling_readout(models.config), cases.signed_sum)
    assert models.actor.step()[0]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_swap_shows_other_weights_and_restores_every_bit(ranks, scenario, layout: Layout) -> None:
    for found in ranks.run(swap, layout.world, scenario, layout):
        assert all(found.values()), found


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_bfloat16_replay_equals_native(ranks, scenario, layout: Layout) -> None:
    """Routes are recorded on the same layout's rank count of one; the same rounding, so native repeats them there."""
    (routes,) = ranks.run(cases.live_routes, 1, scenario, LAYOUTS[0])
    batches = {
        "replayed": cases.with_routes(scenario.batch, routes),
        "again": cases.with_routes(scenario.batch, [r[:, :, ::-1].copy() for r in routes]),
        "permuted": cases.with_routes(scenario.batch, cases.permuted_routes(routes)),
    }
    if layout.world == 1:
        batches["native"] = None
    passes = ranks.run(cases.compare_routings, layout.world, scenario, layout, batches)[0]
    assert all(p.consumed == p.expected for p in passes.values())
    exact = passes["native" if layout.world == 1 else "again"]
    assert np.abs((passes["replayed"].logprobs - exact.logprobs).numpy()).max() <= 0.02
    assert np.abs((passes["replayed"].logprobs - passes["permuted"].logprobs).numpy()).max() > 0.1
