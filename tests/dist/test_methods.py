"""One objective of every family on real Megatron: against a slow float64 reference, and the same in every layout.

A family is where the terms of its loss come together: a decision (SAPO), a turn with a turn critic (Turn-PPO), a turn
with clipping-bias correction (ST-PPO), a sequence (GSPO, GMPO), a group (DRPO), a group's baseline without a critic
(Dr.GRPO).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist import experiment
from tests.dist.compare import Bounds, errors, gradient_errors, violations
from tests.dist.layouts import BASELINE, FAST
from tests.dist.scenario import ALGORITHM, EMPTY_ROW, OPTIMIZER, TEMPERATURE, Layout
from tests.dist.test_invariance import run
from tests.dist.test_reference_step import episodes_of
from tests.reference import methods, plain
from tests.reference.decoder import Architecture, load

COMMON = dict(anchor="recompute", importance="none")
CLIP = dict(name="ppo_clip", clip_low=0.1, clip_high=0.1)
GROUPS = COMMON | dict(estimator=dict(name="dr_grpo", whiten=False), value=None)
ST_PPO = dict(name="st_ppo", clip=0.1)
FAMILIES: dict[str, dict] = {
    "sapo": COMMON | dict(policy="sapo"),
    "turn_ppo": COMMON | dict(policy=dict(name="turn_ppo", clip=0.1), aggregation="token_mean",
                              estimator=dict(name="turn_gae", lam_actor=0.9, lam_critic=0.95)),
    "st_ppo": COMMON | dict(policy=ST_PPO | dict(clipping_bias="exact"), aggregation="sequence_sum_mean"),
    "gspo": GROUPS | dict(policy=dict(name="gspo", clip_low=0.01, clip_high=0.02)),
    "gmpo": GROUPS | dict(policy=dict(name="gmpo", log_clip=0.1)),
    "drpo": GROUPS | dict(policy=dict(name="drpo", max_length=20, tau=2.0, beta=3.0), aggregation="prompt_mean",
                          estimator=dict(name="none", whiten=False)),
    "dr_grpo": GROUPS | dict(policy=CLIP, aggregation=dict(name="constant", constant=30.0)),
}  # fmt: skip
CUTS = {"st_ppo": ("clip",), "turn_ppo": ("clip",), "gspo": ("clip",), "gmpo": ("clip",), "dr_grpo": ("clip",)}
"""Families with a clip that the experiment must reach."""
CLEAN = dict(router_losses={}, reference_kl="none", entropy_coef=0.0)
"""The terms that `test_reference_step` checks are off: the policy loss stands alone."""
SPREAD_BOUNDS = Bounds(scalar=3e-6, gradient=3e-5)
"""Wider than a token loss needs: a turn's ratio is the exponential of a sum, which carries the rounding of all its
log-probs, and a turn critic's second step has few values to average rounding over."""
LAYOUTS = {layout.name: layout for layout in FAST}
DEFAULT = {
    "turn_ppo": "tp2-cp2-ep2-etp2", "gmpo": "cp2-dp2-ep2", "st_ppo": "pp2-vpp2-cp2", "drpo": "cp2-dp2-ep2",
}  # fmt: skip
"""What the default run spreads where; the full run spreads every family over every layout."""


class Slow:
    """The first step's losses in float64."""

    def __init__(self, scenario, settings: dict) -> None:
        files = {name: Path(path) for name, path in scenario.checkpoints.items()}
        self.arch = Architecture.from_hf(json.loads((files["actor"] / "config.json").read_text()))
        self.weights = {name: load(load_file(path / "model.safetensors")) for name, path in files.items()}
        self.batch, self.episodes, self.settings = scenario.batch, episodes_of(scenario.batch), ALGORITHM | settings
        self.rows = [row for row in range(len(self.episodes)) if row != EMPTY_ROW]

    def responses(self) -> list[methods.Response]:
        """Every trajectory with decisions, its log-probs differentiable in the actor's weights."""
        return [
            methods.Response(
                plain.read_policy(self.arch, self.weights["actor"], self.episodes[row], TEMPERATURE)[0],
                plain.read_policy(self.arch, self.weights["anchor"], self.episodes[row], TEMPERATURE)[0].detach(),
                advantages.tolist(),
                self.turns(row),
                self.batch.group_ids[row],
                bool(self.batch.metadata[row]["success"]),
            )
            for row, advantages in zip(self.rows, self.advantages(), strict=True)
        ]

    def turns(self, row: int) -> list[int]:
        return self.episodes[row].turn_id[self.episodes[row].decisions].tolist()

    def advantages(self) -> list[torch.Tensor]:
        """[J] of each trajectory with decisions."""
        if self.settings["estimator"]["name"] in ("dr_grpo", "none"):
            returns = [sum(self.episodes[row].turn_rewards) + self.episodes[row].reward for row in self.rows]
            centred = methods.dr_grpo(returns, [self.batch.group_ids[row] for row in self.rows])
            counts = [len(self.episodes[row].decisions) for row in self.rows]
            return [torch.full((n,), a, dtype=torch.float64) for n, a in zip(counts, centred, strict=True)]
        found = [self.estimates(row)[0] for row in self.rows]
        every = torch.cat(found)
        spread = torch.sqrt(((every - every.mean()) ** 2).mean() + 1e-8)
        return [(a - every.mean()) / spread for a in found]

    def estimates(self, row: int) -> tuple[torch.Tensor, list[float]]:
        """(advantages [J], critic target of each step) on decisions or on turns."""
        episode, turns = self.episodes[row], self.turns(row)
        with torch.no_grad():
            values, successor = plain.read_values(self.arch, self.weights["old_critic"], episode)
        steps = [[j] for j in range(len(turns))]
        if self.settings["estimator"]["name"] == "turn_gae":
            steps = [[j for j, turn in enumerate(turns) if turn == t] for t in sorted(set(turns))]
        rewards = plain.place_rewards(episode)
        inputs = [sum(rewards[j] for j in step) for step in steps], [float(values[step[0]]) for step in steps]
        actor, critic = (
            plain.gae(*inputs, float(successor), self.settings["gamma"], self.settings["estimator"][lam])
            for lam in ("lam_actor", "lam_critic")
        )
        advantages = torch.zeros(len(turns), dtype=torch.float64)
        for step, advantage in zip(steps, actor, strict=True):
            advantages[step] = advantage
        return advantages, [c + v for c, v in zip(critic, inputs[1], strict=True)]

    def turn_critic(self) -> torch.Tensor:
        """Each sequence equal, each of its turns equal; values are read where a turn begins."""
        total = torch.zeros((), dtype=torch.float64)
        for row in self.rows:
            turns = self.turns(row)
            firsts = [turns.index(turn) for turn in sorted(set(turns))]
            values, old = (
                plain.read_values(self.arch, self.weights[name], self.episodes[row])[0][firsts]
                for name in ("critic", "old_critic")
            )
            target = torch.tensor(self.estimates(row)[1], dtype=torch.float64)
            scored = plain.Scored(values, values, None, old.detach(), target, target)
            loss = plain.value_loss(values, scored, self.settings["value"]["clip"])
            total = total + loss.sum() / (len(firsts) * len(self.rows))
        return total


def constant_ppo(responses: list[methods.Response]) -> torch.Tensor:
    """PPO's clip summed over C = 30."""
    losses = [
        methods.clipped((logprob - anchor).exp(), advantage, 0.1, 0.1)[0]
        for r in responses
        for logprob, anchor, advantage in zip(r.logprobs, r.anchor, r.advantages, strict=True)
    ]
    return sum(losses) / 30


def corrected(slow: Slow, responses: list[methods.Response]) -> torch.Tensor:
    """ST-PPO: the loss over max(1, ‖C‖), ‖C‖ over all weights."""
    loss, lost = methods.turn_is(responses, 0.1)
    gradients = torch.autograd.grad(
        lost, list(slow.weights["actor"].values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    norm = torch.sqrt(sum((g * g).sum() for g in gradients))
    assert norm > 1.1, f"the correction divides by 1: ‖C‖ = {float(norm)}"
    return loss / norm


SLOW_LOSSES: dict[str, Callable[[Slow, list[methods.Response]], torch.Tensor]] = {
    "sapo": lambda slow, r: methods.sapo(r, 1.0, 1.05),
    "turn_ppo": lambda slow, r: methods.turn_ppo(r, 0.1),
    "st_ppo": corrected,
    "gspo": lambda slow, r: methods.gspo(r, 0.01, 0.02),
    "gmpo": lambda slow, r: methods.gmpo(r, 0.1),
    "drpo": lambda slow, r: methods.drpo(r, tau=2.0, lam=0.1, beta=3.0, delta=1e-4, max_length=20),
    "dr_grpo": lambda slow, r: constant_ppo(r),
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.full] if f in ("gspo", "dr_grpo") else []) for f in FAMILIES]
)
def test_gradient_is_the_slow_one(ranks, scenario, keep_errors, family: str) -> None:
    settings = FAMILIES[family] | CLEAN
    layout = Layout(f"{family} 1 rank", parallel=BASELINE.parallel, algorithm=settings)
    (found,) = ranks.run(experiment.two_steps, 1, scenario, layout)
    first = found.steps[0]
    for name in CUTS.get(family, ()):
        cut = first.metrics[f"actor/{name}_low"], first.metrics[f"actor/{name}_high"]
        assert min(cut) > 0, f"the experiment does not reach both clips: {cut}"
    slow = Slow(scenario, settings)
    loss = SLOW_LOSSES[family](slow, slow.responses())
    worst = gradient_errors(first.gradients["actor"], plain.gradients_of(loss, slow.weights["actor"]))
    row = {"gradient": max(worst.values())}
    if family == "turn_ppo":
        value = slow.turn_critic()
        assert first.metrics["critic/loss"] == pytest.approx(float(value.detach()), rel=1e-5)
        critic = gradient_errors(first.gradients["critic"], plain.gradients_of(value, slow.weights["critic"]))
        row["gradient"] = max(row["gradient"], *critic.values())
    keep_errors(f"reference, {family}", row)
    if family != "drpo":
        assert first.metrics["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert violations(row, Bounds()) == {}


SPREAD = [
    pytest.param(family, name, id=f"{family} {name}", marks=[] if DEFAULT.get(family) == name else [pytest.mark.full])
    for family in FAMILIES
    for name in LAYOUTS
]


@pytest.mark.parametrize(("family", "name"), SPREAD)
def test_layout(ranks, scenario, keep_errors, family: str, name: str) -> None:
    """KL, entropy, load balancing and z-loss are on beside the family's loss."""
    settings = FAMILIES[family] | (dict(policy=ST_PPO) if family == "st_ppo" else {})
    plain_layout = Layout(f"{family} 1 rank", parallel=BASELINE.parallel, algorithm=settings)
    result = run(ranks, scenario, replace(LAYOUTS[name], algorithm=settings))
    worst = errors(result, run(ranks, scenario, plain_layout), OPTIMIZER["lr"])
    keep_errors(f"{family}, {name}", worst)
    assert violations(worst, SPREAD_BOUNDS) == {}


def first_step(scenario, layout: Layout, rescored: bool) -> dict:
    """Gradients of the first step after a recompute, with log π_θ taken from the anchor's scores or scored again."""
    models = experiment.start(scenario, layout)
    scored = experiment.score_batch(models, scenario.batch)
    scored = replace(scored, actor_steps=-1) if rescored else scored
    gradients: dict = {}
    with experiment.capture(models.actor, gradients, "actor"):
        experiment.update_actor(models, scored, scored.rows)
    return gradients["actor"]


def test_the_anchor_just_scored_is_not_scored_again(ranks, scenario) -> None:
    """It gives the gradient that another scoring pass gives."""
    layout = Layout("gmpo", parallel=BASELINE.parallel, algorithm=FAMILIES["gmpo"])
    once, twice = (ranks.run(first_step, 1, scenario, layout, again)[0] for again in (False, True))
    assert max(gradient_errors(once, twice).values()) < 1e-6
