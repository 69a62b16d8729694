"""Check the objectives against a file of reference values.

A case names the mathematics it covers, its inputs and the expected outputs; lists are flattened over sequences. Every
case is computed through the public functions of `megatron_rl.objectives` (and `megatron_rl.batching` where it asks for
positions of decisions), in float64 and in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

# Runs from a checkout without installing it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.batching import actor_stream  # noqa: E402
from megatron_rl.objectives import advantages as adv  # noqa: E402
from megatron_rl.objectives import aggregation, diagnostics, divergence, groups, importance, policy, rewards, value  # noqa: E402
from megatron_rl.objectives.ewma import ewma_update  # noqa: E402
from megatron_rl.objectives.numerics import merge_moments, moments  # noqa: E402
from megatron_rl.objectives.segments import repeat, segment_mean  # noqa: E402

INTEGERS = (
    "offsets",
    "turn_offsets",
    "sequence_turn_offsets",
    "action_mask",
    "group_ids",
    "prompt_ids",
    "lengths",
    "correct",
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WHITEN_FLOAT32 = 1e-3
"""float32 inputs of mean 1000 and spread 3 have lost three digits before anything is computed."""


class Inputs:
    """A case's inputs by attribute: lists as tensors of one dtype (int64 for counts and ids), numbers as they are."""

    def __init__(self, raw: dict[str, Any], dtype: torch.dtype) -> None:
        self.raw, self.dtype = raw, dtype

    def __getattr__(self, name: str) -> Any:
        item = self.raw[name]
        if not isinstance(item, list):
            return item
        return torch.tensor(item, dtype=torch.int64 if name in INTEGERS else self.dtype)


Outputs = dict[str, Any]


def gae_decoupled(i: Inputs) -> Outputs:
    a, g = adv.gae(
        i.rewards,
        i.values,
        i.offsets,
        gamma=i.gamma,
        lam_actor=i.lam_actor,
        lam_critic=i.lam_critic,
        bootstrap=i.bootstrap,
    )
    return {"advantages": a, "returns": g}


def gae_length_adaptive(i: Inputs) -> Outputs:
    lam = adv.length_adaptive_lambda(i.offsets.diff(), i.gamma, i.alpha)
    bootstrap = torch.zeros(lam.numel(), dtype=i.dtype)
    a, _ = adv.gae(i.rewards, i.values, i.offsets, gamma=i.gamma, lam_actor=lam, bootstrap=bootstrap)
    return {"lam": lam, "advantages": a}


def gae_turn(i: Inputs) -> Outputs:
    per_decision = rewards.place_rewards(
        torch.zeros(1, dtype=i.dtype), i.turn_offsets[[0, -1]], i.turn_rewards, i.turn_offsets
    )
    a, g = adv.turn_gae(
        per_decision,
        repeat(i.turn_values, i.turn_offsets),
        i.turn_offsets,
        i.sequence_turn_offsets,
        gamma=i.gamma,
        lam_actor=i.lam,
        lam_critic=i.lam_critic,
        bootstrap=i.bootstrap,
    )
    return {"turn_advantages": a, "turn_returns": g, "token_advantages": repeat(a, i.turn_offsets)}


def whiten(i: Inputs) -> Outputs:
    stats = merge_moments(moments(part) for part in i.advantages.split(i.shards.long().tolist()))
    return {"mean": stats.mean, "var": stats.variance, "whitened": adv.whiten(i.advantages, i.eps)}


def policy_losses(i: Inputs) -> Outputs:
    x, a, lp, off, turns = i.log_ratio, i.advantages, i.logprobs, i.offsets, i.turn_offsets
    ppo = policy.ppo_clip(x, a, i.clip_low, i.clip_high)
    return {
        "ppo_clip": ppo.loss,
        "dual_clip": policy.dual_clip(ppo, a, i.dual_clip).loss,
        "cispo": policy.cispo(x, lp, a, clip_low=i.cispo_low, clip_high=i.cispo_high).loss,
        "sapo": policy.sapo(x, a, i.sapo_tau_pos, i.sapo_tau_neg),
        "dis": policy.dis(x, lp, a, i.dis_low, i.dis_high).loss,
        "gspo_per_sequence": policy.gspo(x, i.sequence_advantages, off, i.gspo_low, i.gspo_high).loss,
        "gmpo_per_sequence": policy.gmpo(x, i.sequence_advantages, off, i.gmpo_log_clip).loss,
        "turn_ppo_product_per_turn": policy.turn_ppo(x, i.turn_advantages, turns, i.turn_clip).loss,
        "turn_geometric_per_turn": policy.turn_is(x, segment_mean(a, turns), turns, i.turn_clip).loss,
        "turn_geometric_per_decision": policy.turn_is_per_decision(x, a, turns, i.turn_clip).loss,
        **_gradient_coefficients(i),
    }


def _gradient_coefficients(i: Inputs) -> Outputs:
    """c of d loss/dθ = -c A d log π/dθ. It does not depend on |A|; A = 0 is on the side of A < 0."""
    a = torch.where(i.advantages == 0, -1.0, i.advantages)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ppo": lambda x, lp: policy.ppo_clip(x, a, i.clip_low, i.clip_high).loss,
        "cispo": lambda x, lp: policy.cispo(x, lp, a, clip_low=i.cispo_low, clip_high=i.cispo_high).loss,
        "sapo": lambda x, lp: policy.sapo(x, a, i.sapo_tau_pos, i.sapo_tau_neg),
        "dis": lambda x, lp: policy.dis(x, lp, a, i.dis_low, i.dis_high).loss,
    }
    found = {}
    for name, loss in losses.items():
        step = torch.zeros_like(a, requires_grad=True)
        loss(i.log_ratio + step, i.logprobs + step).sum().backward()
        found[f"grad_coefficient.{name}"] = -step.grad / a
    return found


def value_loss(i: Inputs) -> Outputs:
    ev = value.explained_variance(moments(i.returns), moments(i.returns - i.values))
    return {
        "clipped": value.value_loss(i.values, i.returns, i.old_values, i.clip)[0],
        "unclipped": value.value_loss(i.values, i.returns)[0],
        "explained_variance": ev,
    }


def importance_weights(i: Inputs) -> Outputs:
    x, off = i.log_ratio, i.offsets
    tokens = importance.truncated_weights(x, i.token_cap)
    log_weights = importance.product_log_weights(x, off)
    sequences = importance.truncated_weights(log_weights, i.sequence_cap)
    mean = importance.ratio(importance.weighted_mean_sums(sequences))
    token_ess = importance.effective_sample_size(importance.sample_size_sums(tokens))
    sequence_ess = importance.effective_sample_size(importance.sample_size_sums(sequences))
    return {
        "token_truncated": tokens,
        "sequence_log_weight": log_weights,
        "sequence_truncated": sequences,
        "sequence_self_normalised": importance.self_normalise(sequences, mean),
        "sequence_geometric": importance.geometric_weights(x, off),
        "icepop": importance.icepop_weights(x, i.ice_low, i.ice_high),
        "ess_token": token_ess[0],
        "ess_token_fraction": token_ess[1],
        "ess_sequence": sequence_ess[0],
        "ess_sequence_fraction": sequence_ess[1],
        "extreme_fraction_tau2": importance.ratio(diagnostics.extreme_ratio(x, 2.0)),
    }


def kl(i: Inputs) -> Outputs:
    d = i.logprobs - i.reference_logprobs
    return {name: divergence.estimate(d, name) for name in ("k1", "k2", "k3")}


def aggregation_weights(i: Inputs) -> Outputs:
    lengths = i.offsets.diff()
    counts, prompt_sizes = aggregation.count(lengths, i.prompt_ids)
    own = {"prompt_mean": {"prompt_sizes": prompt_sizes}, "constant": {"constant": i.constant}}
    rules = ("token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant")
    weights = {rule: aggregation.sequence_weights(rule, lengths, counts, **own.get(rule, {})) for rule in rules}
    return {rule: repeat(weight, i.offsets) for rule, weight in weights.items()}


def group_baselines(i: Inputs) -> Outputs:
    return {
        "grpo": groups.grpo(i.rewards, i.group_ids, eps=i.std_eps),
        "dr_grpo": groups.dr_grpo(i.rewards, i.group_ids),
        "rloo": groups.rloo(i.rewards, i.group_ids),
        "dynamic_sampling_keep": groups.dynamic_sampling_keep(i.rewards, i.group_ids),
        "soft_overlong": rewards.soft_overlong_penalty(i.lengths, i.max_length, i.overlong_buffer),
    }


def ewma(i: Inputs) -> Outputs:
    average, z, steps = [i.theta[:1].clone()], 1.0, []
    for theta in i.theta[1:]:
        z = ewma_update(z, i.decay, average, [theta[None]])
        steps.append((z, float(average[0])))
    return {"z": [z for z, _ in steps], "theta_bar": [mean for _, mean in steps]}


def reward_placement(i: Inputs) -> Outputs:
    positions = _decision_positions(i.action_mask)
    offsets = torch.tensor([0, positions.numel()])
    starts = torch.cat((torch.ones(1), positions.diff())) != 1
    turns = torch.cat((offsets[:1], starts.nonzero().squeeze(-1), offsets[1:]))
    terminal = torch.tensor([i.terminal_reward], dtype=i.dtype)
    placed = rewards.place_rewards(terminal, offsets, i.turn_rewards, turns)
    shaped = rewards.shape_with_kl(placed, i.behavior_logprobs, i.reference_logprobs, i.kl_beta)
    return {"decision_positions": positions, "rewards": shaped}


def _decision_positions(action_mask: Tensor) -> Tensor:
    """int64 `[D]`: a decision's log-prob is read one position before it in the policy's token stream."""
    mask = action_mask.bool().numpy()
    stream = actor_stream(np.zeros(len(mask), np.int32), np.array([0, len(mask)]), mask)
    return torch.from_numpy(np.flatnonzero(stream.reads >= 0) + 1)


def ewma_decoupled_loss(i: Inputs) -> Outputs:
    result = policy.ewma_decoupled(
        i.logprobs, i.anchor_logprobs, i.behavior_logprobs, i.advantages, i.clip, i.clip, i.ratio_cap
    )
    return {"loss": result.loss}


def categorical(i: Inputs) -> Outputs:
    return {
        "kl": divergence.categorical_kl(i.logits, i.reference_logits, i.temperature),
        "entropy": divergence.categorical_entropy(i.logits, i.temperature),
    }


def evpo(i: Inputs) -> Outputs:
    found = {}
    for name, values in (("good", i.values_good), ("bad", i.values_bad)):
        residual = i.returns - values
        a, ev = adv.evpo(residual, i.returns, moments(i.returns), moments(residual))
        found |= {f"advantage_{name}": a, f"ev_{name}": ev}
    return found


def vpo(i: Inputs) -> Outputs:
    answers = i.reward_vectors
    offsets = torch.arange(0, answers.shape[0] * answers.shape[1] + 1, answers.shape[1])
    reward = groups.set_rewards(answers.flatten(0, 1), offsets, i.weights)
    prompt = torch.zeros(reward.numel(), dtype=torch.int64)
    return {"set_rewards": reward, "advantages": groups.grpo(reward, prompt, eps=i.std_eps)}


def drpo(i: Inputs) -> Outputs:
    prompt = torch.zeros(i.scores.numel(), dtype=torch.int64)
    found = groups.drpo_coefficients(
        i.scores, i.correct.bool(), i.lengths, prompt, max_length=i.max_length, lam=i.lam, tau=i.tau
    )
    return {
        "weights": found.positive_weights,
        "objective": found.objective[0],
        "score_coefficients": found.score,
    }


def turn_is_and_rejection(i: Inputs) -> Outputs:
    x, turns = i.log_ratio, i.turn_offsets
    return {
        "turn_product": importance.truncated_weights(importance.product_log_weights(x, turns), torch.inf),
        "turn_geometric": importance.geometric_weights(x, turns),
        "keep_veto": importance.veto(x, i.offsets, i.veto_floor),
        "keep_k3": importance.keep_sequences_by_mean(x, i.offsets, "k3", i.k3_sequence_mean_max),
    }


CASES: dict[str, Callable[[Inputs], Outputs]] = {
    "gae_decoupled": gae_decoupled,
    "gae_length_adaptive": gae_length_adaptive,
    "gae_turn": gae_turn,
    "whiten": whiten,
    "policy_losses": policy_losses,
    "value_loss": value_loss,
    "importance": importance_weights,
    "kl": kl,
    "aggregation_weights": aggregation_weights,
    "groups": group_baselines,
    "ewma": ewma,
    "reward_placement": reward_placement,
    "ewma_decoupled_loss": ewma_decoupled_loss,
    "categorical": categorical,
    "evpo": evpo,
    "vpo": vpo,
    "drpo": drpo,
    "turn_is_and_rejection": turn_is_and_rejection,
}


class Result(NamedTuple):
    """One output of one case in one precision."""

    case: str
    output: str
    dtype: torch.dtype
    error: float
    """max|found - expected| / max|expected|, infinite for another shape or for an output nobody computes."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= self.tolerance


def relative_error(found: Any, expected: Any) -> float:
    """max|found - expected| over max|expected| (over 1 if nothing but zero is expected); infinite if shapes differ."""
    f, e = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if f.shape != e.shape:
        return torch.inf
    if e.numel() == 0:
        return 0.0
    scale = float(e.abs().max()) or 1.0
    return float((f - e).abs().max()) / scale


def run_case(case: dict[str, Any], dtype: torch.dtype) -> list[Result]:
    """All outputs of one case; the case must be in `CASES`."""
    name = case["name"]
    found = CASES[name](Inputs(case["inputs"], dtype))
    tolerance = WHITEN_FLOAT32 if (name, dtype) == ("whiten", torch.float32) else TOLERANCE[dtype]
    return [
        Result(
            name, output, dtype, relative_error(found[output], expected) if output in found else torch.inf, tolerance
        )
        for output, expected in _flatten(case["expect"]).items()
    ]


def _flatten(expect: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, item in expect.items():
        flat |= {f"{name}.{key}": inner for key, inner in item.items()} if isinstance(item, dict) else {name: item}
    return flat


def _table(results: list[Result]) -> Table:
    table = Table("case", "output", "float64", "float32", title="max|error| / max|expected|")
    for a, b in zip(results[::2], results[1::2], strict=True):
        cells = [f"[{'green' if r.passed else 'bold red'}]{r.error:.1e}{'' if r.passed else ' FAIL'}" for r in (a, b)]
        table.add_row(a.case, a.output, *cells)
    return table


def main(file: Annotated[Path, typer.Argument(help="JSON: {cases: [{name, inputs, expect}]}", exists=True)]) -> None:
    """Compute every case of FILE with megatron_rl.objectives and compare with its expected values.

    A case passes when max|error| over max|expected| is at most 1e-10 in
    float64 and 1e-5 in float32 (whiten: 1e-3, since float32 inputs near 1000
    have lost the digits already). Cases this tool has no function for are
    listed, not failed: add one to CASES to cover it.

    Exit status: 0 if all computed cases pass, 1 if one fails or there is none.

    Example: python tools/check_vectors.py tests/unit/objectives/vectors.json
    """
    cases = json.loads(file.read_text())["cases"]
    known = [case for case in cases if case["name"] in CASES]
    pairs = [(run_case(case, torch.float64), run_case(case, torch.float32)) for case in known]
    results = [r for wide, narrow in pairs for pair in zip(wide, narrow, strict=True) for r in pair]
    console = Console()
    console.print(_table(results))
    missing = [case["name"] for case in cases if case["name"] not in CASES]
    console.print(f"cases not covered: {', '.join(missing) or 'none'}")
    failed = [r for r in results if not r.passed]
    console.print(f"{len(known)} cases, {len(results)} comparisons, {len(failed)} failed")
    raise typer.Exit(1 if failed or not results else 0)


if __name__ == "__main__":
    typer.run(main)
