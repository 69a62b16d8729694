"""Keys that have another name now. An old key is refused with the new one: a run must not begin without a setting."""

from __future__ import annotations

from typing import Any

_ALGORITHM = {
    "advantage": "estimator.name",
    "lam_actor": "estimator.lam_actor",
    "lam_alpha": "estimator.lam_alpha",
    "lam_critic": "estimator.lam_critic",
    "whiten": "estimator.whiten",
    "vpo_draws": "estimator.draws (of vpo)",
    "overlong_buffer": "overlong_penalty.buffer",
    "overlong_length": "overlong_penalty.length, policy.max_length of drpo",
    "dynamic_sampling_rounds": "dynamic_sampling.rounds",
    "policy_loss": "policy.name",
    "clip_low": "policy.clip_low (policy.clip of turn losses)",
    "clip_high": "policy.clip_high (policy.clip of turn losses)",
    "dual_clip": "policy.dual_clip",
    "gmpo_log_clip": "policy.log_clip (of gmpo)",
    "sapo_tau_positive": "policy.tau_positive (of sapo)",
    "sapo_tau_negative": "policy.tau_negative (of sapo)",
    "turn_is_advantage": "policy.advantage (of turn_is, st_ppo)",
    "clipping_bias": "policy.clipping_bias (of s_ppo, st_ppo)",
    "drpo_tau": "policy.tau (of drpo)",
    "drpo_lam": "policy.lam (of drpo)",
    "drpo_beta": "policy.beta (of drpo)",
    "drpo_delta": "policy.delta (of drpo)",
    "value_clip": "value.clip",
    "value_aggregation": "value.aggregation",
    "critic_freeze_attention": "value.freeze_attention",
    "kl_reward_coef": "reference_kl.coef (with reference_kl.name reward)",
    "kl_loss_coef": "reference_kl.coef (with reference_kl.name loss)",
    "kl_estimator": "reference_kl.estimator",
    "kl_target": "reference_kl.target",
    "kl_gain": "reference_kl.gain",
    "ewma_decay": "anchor.decay",
    "ewma_ratio_cap": "anchor.ratio_cap",
    "token_is_cap": "importance.cap (with importance.name token)",
    "sequence_is_cap": "importance.cap (with importance.name sequence)",
    "geometric_is_cap": "importance.cap (with importance.name geometric)",
    "turn_is_cap": "importance.cap (with importance.name turn)",
    "turn_is_mean": "importance.mean (of turn)",
    "icepop": "importance.low and importance.high (of icepop)",
    "is_normalise": "importance.normalise",
    "rejection_estimator": "rejection.estimator",
    "rejection_max": "rejection.max",
    "rejection_min": "rejection.min",
    "staleness_rule": "stale_decisions.rule",
    "max_staleness": "stale_decisions.max_versions",
    "aggregation_constant": "aggregation.constant (of constant)",
    "actor_epochs": "epochs",
    "critic_epochs": "value.epochs",
    "critic_warmup": "value.warmup.iterations",
    "critic_warmup_patience": "value.warmup.patience",
    "critic_warmup_gain": "value.warmup.gain",
    "aux_loss_coef": "router_losses.aux_coef",
    "z_loss_coef": "router_losses.z_coef",
}
RENAMED = {f"algorithm.{old}": f"algorithm.{new}" for old, new in _ALGORITHM.items()} | {"gate": "first_step_check"}
"""Old key → new one."""
RESHAPED = {
    "algorithm.rejection": (str, "algorithm.rejection.unit"),
    "algorithm.dynamic_sampling": (bool, "algorithm.dynamic_sampling: {} (null switches it off)"),
}
"""Keys that are sections now → the type that an old value has, and what to write instead."""


def new_name_of(key: str, value: Any) -> str | None:
    """What an old key (or an old value of a key) is written as now; None where it is not an old one."""
    kind, new = RESHAPED.get(key, (type(None), ""))
    if new and isinstance(value, kind):
        return new
    return RENAMED.get(key)
