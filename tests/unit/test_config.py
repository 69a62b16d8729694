"""The configuration refuses what it does not know and what contradicts, and says which setting to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_rl.config import AlgorithmConfig, RunConfig, load_config
from megatron_rl.config.refusals import REFUSALS
from megatron_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_and_dotted_overrides() -> None:
    config = load_config(None, ["optimizer.lr=2e-5", "parallel.expert=4"])
    assert (config.optimizer.lr, config.parallel.expert, config.algorithm.anchor) == (2e-5, 4, "ewma")


def test_every_example_loads() -> None:
    files = sorted(ROOT.glob("examples/**/*.yaml"))
    assert files and all(isinstance(load_config(file), RunConfig) for file in files)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["optimizer.learning_rates=1"])
    assert caught.value.field == "optimizer.learning_rates"
    with pytest.raises(ConfigError, match="'minibatches'"):
        load_config(None, ["algorithm.minibatchs=2"])


def test_wrong_type_names_key_found_and_expected() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["parallel.tensor=two"])
    error = caught.value
    assert (error.field, error.found) == ("parallel.tensor", "'two'") and "integer" in error.expected


GRPO = ["advantage=grpo", "anchor=recompute"]
CONTRADICTIONS = {
    "KL twice": (["kl_loss_coef=0.1", "kl_reward_coef=0.1"], "different objectives"),
    "two corrections": (["token_is_cap=2", "sequence_is_cap=2"], "twice"),
    "dual clip of the decoupled loss": (["dual_clip=3"], "decoupled loss"),
    "constant without C": (["aggregation=constant"], "aggregation_constant"),
    "critic options without critic": ([*GRPO, "value_clip=0.2", "critic_epochs=2"], "value_clip=null, critic_epochs=1"),
    "value pretraining without critic": ([*GRPO, "critic_warmup=3"], "critic_warmup=0"),
    "length-adaptive λ without critic": ([*GRPO, "lam_alpha=0.05"], "lam_alpha=null"),
    "length-adaptive λ on turns": (["advantage=turn_gae", "lam_alpha=0.05"], "clock"),
    "length-adaptive λ without discount": (["lam_alpha=0.05", "gamma=0"], "gamma above 0"),
    "Turn-PPO with a token critic": (["policy_loss=turn_ppo", "anchor=recompute"], "advantage=turn_gae"),
    "GSPO with token advantages": (
        ["policy_loss=gspo", "anchor=recompute", "aggregation=sequence_mean"], "policy_loss=gspo_token"),
    "GSPO counted by token": ([*GRPO, "policy_loss=gspo"], "set aggregation to prompt_mean or sequence_mean"),
    "DRPO with advantages": (["policy_loss=drpo"], "go together"),
    "no advantages for PPO": (["advantage=none"], "go together"),
    "DRPO by token": (["policy_loss=drpo", "advantage=none", "anchor=recompute"], "aggregation=prompt_mean"),
    "DRPO without length": (
        ["policy_loss=drpo", "advantage=none", "anchor=recompute", "aggregation=prompt_mean"], "overlong_length"),
    "DIS with an anchor": (["policy_loss=dis", "anchor=recompute"], "anchor=behaviour"),
    "DIS with EWMA": (["policy_loss=dis"], "anchor=behaviour"),
    "DIS corrected again": (["policy_loss=dis", "anchor=behaviour", "token_is_cap=2"], "no importance weights"),
    "REINFORCE with EWMA": (["policy_loss=reinforce"], "no proximal ratio"),
    "SAPO with EWMA": (["policy_loss=sapo"], "only ppo_clip has a decoupled form"),
    "dual clip of SAPO": (["policy_loss=sapo", "anchor=recompute", "dual_clip=3"], "means nothing for sapo"),
    "correction of nothing": (["anchor=behaviour", "token_is_cap=2"], "nothing to correct"),
    "rejection of nothing": (["anchor=behaviour", "rejection=token", "rejection_max=1"], "nothing to correct"),
    "normalising nothing": (["is_normalise=true"], "there are none"),
    "rejection without bound": (["anchor=recompute", "rejection=token"], "rejection_max"),
    "lower bound of k3": (
        ["anchor=recompute", "rejection=token", "rejection_max=1", "rejection_min=0"], "rejection_estimator=k1"),
    "icepop upside down": (["anchor=recompute", "icepop=[5, 0.5]"], "0 < α <= β"),
    "stale without threshold": (["staleness_rule=drop"], "max_staleness"),
    "CISPO without bound": (["policy_loss=cispo", "anchor=recompute"], "set clip_high"),
    "a turn clipped unevenly": (["policy_loss=turn_is", "anchor=recompute", "clip_high=0.28"], "one ε"),
    "overlong buffer without length": (["overlong_buffer=4"], "overlong_length"),
    "patience without warm-up": (["critic_warmup_patience=2"], "critic_warmup"),
    "dynamic sampling with a critic": (["dynamic_sampling=true"], "dynamic_sampling=false"),
    "a target for no KL": (["kl_target=0.1"], "steers"),
    "shaped reward that VPO does not read": (
        ["advantage=vpo", "anchor=recompute", "kl_reward_coef=0.1"], "reward_vector"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_of_the_objective_are_refused(name: str) -> None:
    settings, match = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=re.escape(match)):
        load_config(None, [f"algorithm.{setting}" for setting in settings])


def test_every_refusal_has_a_case() -> None:
    """And some case reaches each row before all others."""
    loose = AlgorithmConfig.model_construct
    first = {
        next(
            i for i, row in enumerate(REFUSALS) if row.holds(loose(**OmegaConf.to_container(OmegaConf.from_dotlist(s))))
        )
        for s, _ in CONTRADICTIONS.values()
    }
    assert first == set(range(len(REFUSALS)))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["performance.fp8=true"], "performance.fp8"),
        (["performance.moe_dispatcher=flex"], "moe_dispatcher"),
        (["performance.optimizer_cpu_offload=true"], "optimizer_cpu_offload"),
        (["performance.overlap_grad_reduce=true"], "overlap_grad_reduce"),
        (
            ["algorithm.advantage=grpo", "algorithm.anchor=recompute", "rollout.environment_options.maps_per_prompt=1"],
            "maps_per_prompt to at least 2",
        ),
        (["rollout.mode=async"], "algorithm.anchor"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(None, overrides)


RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
TASKS = sorted(path for path in ROOT.glob("examples/*/ppo.yaml") if "recipes" not in path.parts)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_go_over_every_task(recipe: Path) -> None:
    """As a further file or in a list; the task's settings stay, the recipe's and overrides win."""
    for task in TASKS:
        config = load_config(task, [str(recipe), "algorithm.gamma=0.5"])
        assert config == load_config([task, recipe], ["algorithm.gamma=0.5"])
        assert config.rollout == load_config(task).rollout and config.algorithm.gamma == 0.5
        asked = OmegaConf.to_container(OmegaConf.load(recipe))
        assert set(asked) == {"algorithm"}
        wanted = asked["algorithm"] | {"gamma": 0.5}
        assert {name: getattr(config.algorithm, name) for name in wanted} == wanted


def test_defaults_are_the_papers() -> None:
    ranges = {
        "ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "dis": (0.3, 5.0), "turn_ppo": (0.2, 0.2), "turn_is": (0.2, 0.2),
    }  # fmt: skip
    for name, expected in ranges.items():
        settings = dict(policy_loss=name, anchor="behaviour", advantage="turn_gae")
        settings |= dict(advantage="grpo", aggregation="sequence_mean") if name == "gspo" else {}
        assert AlgorithmConfig(**settings).clip_range == expected
    assert AlgorithmConfig(policy_loss="cispo", anchor="behaviour", clip_high=2).clip_range == (1.0, 2.0)
    assert AlgorithmConfig(clip_high=0.28).clip_range == (0.2, 0.28)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "absent.yaml")
    assert caught.value.file == tmp_path / "absent.yaml"


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        AlgorithmConfig().gamma = 0.5  # type: ignore[misc]


def test_every_setting_is_documented() -> None:
    def undocumented(section, prefix=""):
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                yield from undocumented(inner, f"{prefix}{name}.")
            if not field.description:
                yield prefix + name

    assert list(undocumented(RunConfig)) == []
