"""Real Megatron on one rank against the slow float64 reference: two optimizer steps of actor and critic.

Load-balancing and z-loss are off here (the reference has neither; `test_routers` checks them). Bounds are those between
layouts: float32 against float64 is no further apart than two orders of summation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.dist import experiment
from tests.dist.compare import Bounds, errors, violations
from tests.dist.layouts import BASELINE
from tests.dist.scenario import ALGORITHM, OPTIMIZER, SECOND_STEP, TEMPERATURE, Layout
from tests.reference import plain
from tests.reference.decoder import Architecture, load

OFF = dict(router_losses={})
PLAIN = {name: value for name, value in ALGORITHM["policy"].items() if name != "dual_clip"}
VARIANTS = {"sequence weights and dual clip": {}, "decoupled": dict(importance="none", policy=PLAIN)}


def episodes_of(batch) -> list[plain.Episode]:
    """The recorded trajectories, one by one."""
    return [_episode(batch, row) for row in range(len(batch))]


def _episode(batch, row: int) -> plain.Episode:
    tokens = slice(batch.offsets[row], batch.offsets[row + 1])
    routes = torch.as_tensor(batch.routes[row].astype(np.int64))
    return plain.Episode(
        tokens=torch.as_tensor(batch.tokens[tokens]).long(),
        action_mask=torch.as_tensor(batch.action_mask[tokens]),
        turn_id=torch.as_tensor(batch.turn_id[tokens]).long(),
        behaviour=torch.as_tensor(batch.logprobs[tokens]).double(),
        turn_rewards=batch.turn_rewards[batch.turn_offsets[row] : batch.turn_offsets[row + 1]].tolist(),
        reward=float(batch.reward[row]),
        truncated=bool(batch.truncated[row]),
        boundary_tokens=torch.as_tensor(
            batch.boundary_tokens[batch.boundary_offsets[row] : batch.boundary_offsets[row + 1]]
        ).long(),
        routes=torch.where(routes == 255, -1, routes),
    )


def objective_of(algorithm) -> plain.Objective:
    """The same settings under the reference's names."""
    policy, estimator, importance = (algorithm[name] for name in ("policy", "estimator", "importance"))
    cap = None if importance == "none" else importance["cap"]
    return plain.Objective(
        temperature=TEMPERATURE,
        whiten=True,
        kl_coef=algorithm["reference_kl"]["coef"],
        decoupled=cap is None,
        sequence_is_cap=cap,
        value_clip=algorithm["value"]["clip"],
        **{name: policy.get(name) for name in ("clip_low", "clip_high", "dual_clip")},
        **{name: estimator[name] for name in ("lam_actor", "lam_critic")},
        **{name: algorithm[name] for name in ("gamma", "entropy_coef", "aggregation")},
    )


class Reference:
    """Two steps of the experiment in float64."""

    def __init__(self, scenario, algorithm) -> None:
        files = {name: Path(path) for name, path in scenario.checkpoints.items()}
        self.arch = Architecture.from_hf(json.loads((files["actor"] / "config.json").read_text()))
        weights = {name: load(load_file(path / "model.safetensors")) for name, path in files.items()}
        self.weights = {"actor": weights["actor"], "critic": weights["critic"], "ewma": weights["anchor"]}
        self.reference, self.objective, self.z = weights["reference"], objective_of(algorithm), 1.0
        self.episodes = episodes_of(scenario.batch)
        self.scored = plain.score(
            self.arch, weights["old_critic"], self.episodes, self.objective,
            anchor=weights["anchor"], reference=self.reference,
        )  # fmt: skip
        undecayed = frozenset(n for n, w in (weights["actor"] | weights["critic"]).items() if w.ndim == 1)
        self.adam = plain.AdamW(
            OPTIMIZER["lr"], eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"], undecayed=undecayed,
            max_norm=OPTIMIZER["clip_grad"],
        )  # fmt: skip
        self.states = {"actor": plain.AdamState(), "critic": plain.AdamState()}

    def run(self) -> experiment.Result:
        """As `experiment.two_steps` reports it."""
        scored = {
            name: torch.cat([getattr(s, name) for s in self.scored]) for name in ("advantages", "returns", "values")
        }
        rows = [row for row, episode in enumerate(self.episodes) if len(episode.decisions)]
        return experiment.Result(scored, {}, [self._step(rows), self._step(list(SECOND_STEP))])

    def _step(self, rows: list[int]) -> experiment.StepResult:
        readings, margin = self._read(rows)
        episodes = [self.episodes[row] for row in rows]
        counts = [len(e.decisions) for e in self.episodes]
        anchors = {row: readings["anchor"].split(counts)[row] for row in rows}
        scored = [plain.Scored(**{**vars(self.scored[row]), "anchor": anchors[row]}) for row in rows]
        losses = {
            name: function(self.arch, self.weights[name], episodes, scored, self.objective)
            for name, function in (("actor", plain.actor_loss), ("critic", plain.critic_loss))
        }
        steps = {
            name: plain.optimizer_step(loss, self.weights[name], self.states[name], self.adam)
            for name, loss in losses.items()
        }
        self.weights |= {name: step.weights for name, step in steps.items()}
        self.z, self.weights["ewma"] = plain.ewma(self.z, self.weights["ewma"], steps["actor"].weights, 0.889)
        metrics = {f"{name}/loss": step.loss for name, step in steps.items()}
        metrics |= {f"{name}/grad_norm": step.norm for name, step in steps.items()}
        gradients = {name: step.gradients for name, step in steps.items()}
        weights = {name: {n: w.detach() for n, w in part.items()} for name, part in self.weights.items()}
        return experiment.StepResult(readings, margin, metrics, gradients, weights, self.z)

    @torch.no_grad()
    def _read(self, rows: list[int]) -> tuple[dict[str, torch.Tensor], float]:
        policies = {"theta": self.weights["actor"], "anchor": self.weights["ewma"], "reference": self.reference}
        read = {name: [] for name in (*policies, "values")}
        for row, episode in enumerate(self.episodes):
            blank = torch.zeros(len(episode.decisions), dtype=torch.float64)
            for name, weights in policies.items():
                logprobs = plain.read_policy(self.arch, weights, episode, TEMPERATURE)[0] if row in rows else blank
                read[name].append(logprobs)
            critic = self.weights["critic"]
            read["values"].append(plain.read_values(self.arch, critic, episode)[0] if row in rows else blank)
        return {name: torch.cat(parts) for name, parts in read.items()}, 1.0


@pytest.mark.parametrize("name", VARIANTS)
def test_two_steps(ranks, scenario, keep_errors, name: str) -> None:
    layout = Layout(name, parallel=BASELINE.parallel, algorithm=VARIANTS[name] | OFF)
    (found,) = ranks.run(experiment.two_steps, 1, scenario, layout)
    expected = Reference(scenario, ALGORITHM | VARIANTS[name]).run()
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        theirs.metrics |= {n: ours.metrics[n] for n in ("actor/magnitude", "critic/magnitude")}
        ours.metrics = {n: ours.metrics[n] for n in theirs.metrics}
    found.metrics = {}
    worst = errors(found, expected, OPTIMIZER["lr"])
    keep_errors(f"reference, {name}", worst)
    assert violations(worst, Bounds()) == {}
