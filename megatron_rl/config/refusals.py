"""Settings of the objective that contradict each other: one row a contradiction, with the reason and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.config.methods import EACH_SEQUENCE_EQUAL, METHODS

if TYPE_CHECKING:
    from megatron_rl.config.algorithm import AlgorithmConfig


class Refusal(NamedTuple):
    """A contradiction."""

    holds: Callable[[AlgorithmConfig], object]
    reason: str
    """Why, and which setting to change; `{...}` is filled from the configuration."""


CRITIC_SETTINGS = {
    "value_clip": None,
    "value_aggregation": None,
    "critic_epochs": 1,
    "critic_warmup": 0,
    "critic_warmup_patience": None,
    "critic_freeze_attention": False,
    "lam_alpha": None,
}
"""Settings of a critic, and the values that ask for nothing."""


def _corrections(a: AlgorithmConfig) -> int:
    caps = (a.token_is_cap, a.sequence_is_cap, a.geometric_is_cap, a.turn_is_cap, a.icepop)
    return sum(cap is not None for cap in caps)


def critic_settings_in_use(a: AlgorithmConfig) -> list[str]:
    """Names of the critic's settings that ask for something."""
    return [name for name, idle in CRITIC_SETTINGS.items() if getattr(a, name) != idle]


_ESTIMATOR_REFUSALS = (
    Refusal(
        lambda a: not a.needs_critic and critic_settings_in_use(a),
        "advantage '{advantage}' has no critic, but {critic_settings} set one up: set {critic_resets}, or advantage to "
        "gae, turn_gae or evpo",
    ),
    Refusal(
        lambda a: a.lam_alpha is not None and a.advantage == "turn_gae",
        "lam_alpha makes λ from the number of decisions, and the clock of 'turn_gae' is turns: set lam_alpha to null",
    ),
    Refusal(
        lambda a: a.lam_alpha is not None and a.gamma == 0,
        "length-adaptive λ divides by gamma, which is 0: set lam_alpha to null or gamma above 0",
    ),
    Refusal(
        lambda a: (a.advantage == "none") != (a.policy_loss == "drpo"),
        "advantage 'none' and policy_loss 'drpo' go together: DRPO weighs responses itself, every other loss needs "
        "advantages; set both or neither",
    ),
    Refusal(
        lambda a: a.advantage not in METHODS[a.policy_loss].advantages and a.policy_loss == "turn_ppo",
        "turn_ppo clips once a turn with one advantage a turn; '{advantage}' ticks gamma and λ on decisions: set "
        "advantage=turn_gae (a turn critic), or policy_loss=turn_is, which averages token advantages",
    ),
    Refusal(
        lambda a: a.advantage not in METHODS[a.policy_loss].advantages,
        "{policy_loss} has one advantage a sequence, '{advantage}' gives one a decision: set advantage to grpo, "
        "dr_grpo, rloo, batch_mean or vpo, or policy_loss=gspo_token",
    ),
    Refusal(
        lambda a: a.overlong_buffer and (a.overlong_length is None or a.overlong_buffer > a.overlong_length),
        "the soft overlong penalty falls over overlong_buffer decisions up to overlong_length: set overlong_length to "
        "at least {overlong_buffer}, or overlong_buffer=0",
    ),
    Refusal(
        lambda a: a.critic_warmup_patience is not None and not a.critic_warmup,
        "critic_warmup_patience ends the critic's warm-up early, and critic_warmup is 0: set critic_warmup to the most "
        "iterations it may take",
    ),
    Refusal(
        lambda a: a.advantage in ("vpo", "none") and (a.kl_reward_coef or a.overlong_buffer),
        "kl_reward_coef and overlong_buffer shape the reward, which advantage '{advantage}' does not read (VPO scores "
        "reward_vector, DRPO correctness): set both to 0",
    ),
    Refusal(
        lambda a: a.dynamic_sampling and a.advantage in ("gae", "turn_gae", "evpo"),
        "dynamic_sampling drops groups that teach a group baseline nothing; a critic learns from them too: set "
        "dynamic_sampling=false, or advantage to a group baseline",
    ),
)

_ANCHOR_REFUSALS = (
    Refusal(
        lambda a: a.policy_loss == "dis" and a.anchor != "behaviour",
        "dis takes its ratio to the behaviour policy directly, there is no anchor '{anchor}' in it: set "
        "anchor=behaviour",
    ),
    Refusal(
        lambda a: a.anchor not in METHODS[a.policy_loss].anchors,
        "{policy_loss} has no proximal ratio for anchor '{anchor}' to be the proximal policy of: set anchor=recompute "
        "or anchor=behaviour",
    ),
    Refusal(
        lambda a: a.is_decoupled and a.policy_loss != "ppo_clip",
        "anchor 'ewma' is not the sampler, and only ppo_clip has a decoupled form: set anchor=recompute, or correct "
        "with token_is_cap or sequence_is_cap",
    ),
    Refusal(
        lambda a: a.dual_clip is not None and METHODS[a.policy_loss].dual_clip and a.is_decoupled,
        "dual_clip bounds the clipped surrogate, which the decoupled loss of anchor 'ewma' is not: set dual_clip to "
        "null, or token_is_cap or sequence_is_cap",
    ),
    Refusal(
        lambda a: a.dual_clip is not None and not METHODS[a.policy_loss].dual_clip,
        "dual_clip means nothing for {policy_loss}, which has no clipped ratio that could grow: set dual_clip to null",
    ),
    Refusal(
        lambda a: _corrections(a) > 1,
        "token_is_cap, sequence_is_cap, geometric_is_cap, turn_is_cap and icepop correct the same bias, here twice: "
        "set all but one of them to null",
    ),
    Refusal(
        lambda a: _corrections(a) and not METHODS[a.policy_loss].importance,
        "{policy_loss} takes no importance weights of an anchor: set token_is_cap, sequence_is_cap, geometric_is_cap, "
        "turn_is_cap and icepop to null",
    ),
    Refusal(
        lambda a: (_corrections(a) or a.rejection is not None or a.veto is not None) and a.anchor == "behaviour",
        "with anchor 'behaviour' ρ = π_anchor/μ is 1, there is nothing to correct or reject: set the *_is_cap, icepop, "
        "rejection and veto to null, or anchor=recompute",
    ),
    Refusal(
        lambda a: a.is_normalise and not _corrections(a),
        "is_normalise divides importance weights, and there are none: set is_normalise=false, or one of token_is_cap, "
        "sequence_is_cap, geometric_is_cap, turn_is_cap, icepop",
    ),
    Refusal(
        lambda a: a.icepop is not None and not 0 < a.icepop[0] <= a.icepop[1],
        "icepop keeps ρ between α and β: set 0 < α <= β, for instance [0.5, 5]",
    ),
    Refusal(
        lambda a: (a.rejection is None) != (a.rejection_max is None),
        "rejection and rejection_max go together: set both or neither",
    ),
    Refusal(
        lambda a: a.rejection_min is not None and (a.rejection is None or a.rejection_estimator != "k1"),
        "rejection_min bounds k1, the only estimate that can be negative: set rejection and rejection_estimator=k1, or "
        "rejection_min to null",
    ),
    Refusal(
        lambda a: a.staleness_rule != "keep" and a.max_staleness is None,
        "staleness_rule '{staleness_rule}' needs max_staleness, in weight versions",
    ),
)

_LOSS_REFUSALS = (
    Refusal(
        lambda a: a.kl_reward_coef > 0 and a.kl_loss_coef > 0,
        "kl_reward_coef and kl_loss_coef are different objectives: set one of them to 0",
    ),
    Refusal(
        lambda a: a.kl_target is not None and not a.needs_reference,
        "kl_target steers β_KL, which is 0: set kl_loss_coef or kl_reward_coef to where it starts, or "
        "kl_target to null",
    ),
    Refusal(
        lambda a: "constant" in (a.aggregation, a.value_aggregation) and a.aggregation_constant is None,
        "aggregation 'constant' needs aggregation_constant",
    ),
    Refusal(
        lambda a: a.policy_loss == "drpo" and a.aggregation != "prompt_mean",
        "drpo divides by the number of prompts: set aggregation=prompt_mean",
    ),
    Refusal(
        lambda a: a.aggregation not in METHODS[a.policy_loss].aggregations,
        "{policy_loss} has one loss a sequence, which '{aggregation}' would count once a decision: set aggregation to "
        + " or ".join(sorted(EACH_SEQUENCE_EQUAL)),
    ),
    Refusal(
        lambda a: a.policy_loss == "cispo" and a.clip_high is None,
        "CISPO's paper names no ε_h: set clip_high",
    ),
    Refusal(
        lambda a: METHODS[a.policy_loss].clock == "turn" and a.clip_range[0] != a.clip_range[1],
        "{policy_loss} clips by one ε on both sides: set clip_low and clip_high to the same",
    ),
    Refusal(
        lambda a: a.policy_loss == "drpo" and a.overlong_length is None,
        "drpo weighs correct responses by their share of the longest allowed: set overlong_length",
    ),
)

REFUSALS = (*_ESTIMATOR_REFUSALS, *_ANCHOR_REFUSALS, *_LOSS_REFUSALS)


def first_contradiction(algorithm: AlgorithmConfig) -> str | None:
    """The reason of the first row that holds, or None."""
    for refusal in REFUSALS:
        if refusal.holds(algorithm):
            return _fill(refusal.reason, algorithm)
    return None


RESPONSES = ("maps_per_prompt", "responses_per_prompt")
"""Options by which the tasks of this package say how many responses a prompt gets."""


def single_responses(algorithm: AlgorithmConfig, options: Mapping[str, Any]) -> str | None:
    """Why the task's options do not suit a group method, or None. Where they do not tell, the first batch does."""
    told = next((name for name in RESPONSES if options.get(name) == 1), None)
    if told is None or not algorithm.needs_groups:
        return None
    return (
        f"advantage '{algorithm.advantage}' compares responses to one prompt, and {told} is 1: set "
        f"rollout.environment_options.{told} to at least 2 (also where a level of rollout.curriculum changes it), or "
        "algorithm.advantage to gae or batch_mean"
    )


def _fill(reason: str, a: AlgorithmConfig) -> str:
    used = critic_settings_in_use(a)
    resets = {name: CRITIC_SETTINGS[name] for name in used}
    return reason.format(
        **a.model_dump(),
        critic_settings=", ".join(used),
        critic_resets=", ".join(
            f"{name}={'null' if idle is None else str(idle).lower()}" for name, idle in resets.items()
        ),
    )
