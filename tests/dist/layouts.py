"""The layouts of the invariance matrix. FAST covers every pair of switches and runs by default; FULL is all of it."""

from __future__ import annotations

from tests.dist.scenario import Layout

BASELINE = Layout("1 rank", parallel=dict(distributed_optimizer=False))


def _layout(name: str, world: int = 1, *, budget: int = 256, packed: bool = True, shuffled: bool = False, **parallel):
    return Layout(name, world, parallel, budget, packed, shuffled)


FAST = (
    _layout("tp2-pp2-ep2", 4, tensor=2, pipeline=2, expert=2, recompute="full", distributed_optimizer=False, budget=40),
    _layout("tp2-cp2-ep2-etp2", 4, tensor=2, context=2, expert=2, expert_tensor=2, recompute="selective", packed=False),
    _layout("pp2-vpp2-cp2", 4, pipeline=2, virtual_pipeline=2, context=2, recompute="full", shuffled=True, budget=48),
    _layout("tp2-dp2-ep4", 4, tensor=2, expert=4, budget=26, shuffled=True),
    _layout("pp2-dp2-ep2", 4, pipeline=2, expert=2, recompute="selective", distributed_optimizer=False, packed=False,
            shuffled=True, budget=48),
    _layout("cp2-dp2-ep2", 4, context=2, expert=2, recompute="full", budget=26),
    _layout("dp4", 4, recompute="full", packed=False, shuffled=True),
)  # fmt: skip

SLOW = (
    _layout("dp2 dopt", 2),
    _layout("dp2", 2, distributed_optimizer=False, budget=32),
    _layout("tp2", 2, tensor=2),
    _layout("tp2 plain opt", 2, tensor=2, distributed_optimizer=False, recompute="selective"),
    _layout("pp2", 2, pipeline=2, budget=40),
    _layout("pp2-vpp2", 2, pipeline=2, virtual_pipeline=2, budget=32),
    _layout("pp2 first 1", 2, pipeline=2, first_stage_layers=1),
    _layout("pp2 last 1", 2, pipeline=2, last_stage_layers=1, recompute="full"),
    _layout("pp4", 4, pipeline=4, budget=26, recompute="full"),
    _layout("ep2", 2, expert=2),
    _layout("ep2 plain opt", 2, expert=2, distributed_optimizer=False),
    _layout("ep2-tp2-etp1", 2, expert=2, tensor=2),
    _layout("tp2-etp2", 2, tensor=2, expert_tensor=2),
    _layout("ep2-tp2-etp2", 4, expert=2, tensor=2, expert_tensor=2, distributed_optimizer=False),
    _layout("dp2-etp2", 2, expert_tensor=2, budget=40),
    _layout("cp2", 2, context=2, budget=40),
    _layout("cp2-ep2", 2, context=2, expert=2),
    _layout("cp4", 4, context=4),
    _layout("tp2-pp2-ep2 dopt", 4, tensor=2, pipeline=2, expert=2),
    _layout("tp2-cp2-pp2", 8, tensor=2, context=2, pipeline=2, expert=2, budget=48),
    _layout("dp8-ep4", 8, expert=4),
    _layout("recompute full", recompute="full", budget=40),
    _layout("recompute selective", recompute="selective"),
    _layout("2 micro-batches", budget=48),
    _layout("5 micro-batches", budget=21),
    _layout("padded", packed=False, budget=48),
    _layout("shuffled", shuffled=True),
)

SWITCHES = {
    "tp": lambda layout: layout.parallel.get("tensor", 1) > 1,
    "pp": lambda layout: layout.parallel.get("pipeline", 1) > 1,
    "cp": lambda layout: layout.parallel.get("context", 1) > 1,
    "dp": lambda layout: layout.world > model_ranks(layout),
    "ep": lambda layout: layout.parallel.get("expert", 1) > 1,
    "distributed optimizer": lambda layout: layout.parallel.get("distributed_optimizer", True),
    "recompute": lambda layout: layout.parallel.get("recompute") == "full",
    "micro-batches": lambda layout: layout.budget < 100,
    "padded": lambda layout: not layout.packed,
    "shuffled": lambda layout: layout.shuffled,
}
"""What FAST covers: every pair is on together in some layout."""


def model_ranks(layout: Layout) -> int:
    """Ranks of one replica."""
    sizes = [layout.parallel.get(name, 1) for name in ("tensor", "pipeline", "context")]
    return sizes[0] * sizes[1] * sizes[2]
