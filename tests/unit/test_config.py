"""The configuration refuses what it does not know and what contradicts, and says which setting to change."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megatron_rl.config import AlgorithmConfig, RunConfig, load_config
from megatron_rl.config.algorithm import REFUSALS
from megatron_rl.config.load import _layered, _override
from megatron_rl.config.renamed import RENAMED, RESHAPED
from megatron_rl.config.yaml_file import dump_yaml, read_yaml_file
from megatron_rl.errors import ConfigError
from megatron_rl.methods import KINDS, method_of
from megatron_rl.section import Section

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_and_dotted_overrides() -> None:
    config = load_config(None, ["optimizer.lr=2e-5", "parallel.expert=4"])
    assert (config.optimizer.lr, config.parallel.expert, config.algorithm.anchor.name) == (2e-5, 4, "ewma")


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
    assert (error.field, error.found) == ("parallel.tensor", "'two'") and error.expected == "a whole number"


GRPO = ["estimator=grpo", "anchor=recompute"]
CONTRADICTIONS = {
    "critic options without critic": ([*GRPO, "value.clip=0.2"], "set value to null"),
    "Turn-PPO with a token critic": (["policy=turn_ppo", "anchor=recompute"], "turn_gae"),
    "GSPO with token advantages": (["policy=gspo", "anchor=recompute"], "set estimator to batch_mean or grpo"),
    "DRPO with advantages": (["policy=drpo", "policy.max_length=9", "anchor=recompute"], "set estimator to none"),
    "no advantages for PPO": (["estimator=none", "anchor=recompute"], "takes one a decision or sequence or turn"),
    "shaped reward that VPO does not read": (
        ["estimator=vpo", "anchor=recompute", "reference_kl={name: reward, coef: 0.1}"], "does not read"),
    "dynamic sampling with a critic": (["dynamic_sampling={}"], "dynamic_sampling to null"),
    "DIS with an anchor": (["policy=dis", "anchor=recompute"], "set anchor to behaviour"),
    "REINFORCE with EWMA": (["policy=reinforce"], "set anchor to behaviour or recompute"),
    "SAPO with EWMA": (["policy=sapo"], "no decoupled form"),
    "DIS corrected again": (["policy=dis", "anchor=behaviour", "importance=token"], "no importance weights"),
    "correction of nothing": (["anchor=behaviour", "importance=token"], "nothing to correct"),
    "rejection of nothing": (["anchor=behaviour", "rejection={unit: token, max: 1}"], "nothing to correct"),
    "GSPO counted by token": (
        [*GRPO, "policy=gspo", "aggregation=token_mean"], "set aggregation to prompt_mean or sequence_mean"),
    "DRPO by token": (
        ["policy=drpo", "policy.max_length=9", "estimator=none", "anchor=recompute", "aggregation=token_mean"],
        "set aggregation to prompt_mean"),
    "dual clip of the decoupled loss": (["policy.dual_clip=3"], "decoupled loss"),
    "length-adaptive λ without discount": (["estimator.lam_alpha=0.05", "gamma=0"], "gamma above 0"),
}  # fmt: skip
UNREPRESENTABLE = {
    "KL twice": ["kl_loss_coef=0.1", "kl_reward_coef=0.1"],
    "two corrections": ["importance=token", "importance.high=3"],
    "constant without C": ["aggregation=constant"],
    "length-adaptive λ on turns": ["estimator=turn_gae", "estimator.lam_alpha=0.05"],
    "DRPO without length": ["policy=drpo", "estimator=none", "anchor=recompute"],
    "dual clip of SAPO": ["policy=sapo", "policy.dual_clip=3", "anchor=recompute"],
    "normalising nothing": ["importance.normalise=true"],
    "rejection without bound": ["rejection.unit=token", "anchor=recompute"],
    "lower bound of k3": ["rejection={unit: token, max: 1, min: 0}", "anchor=recompute"],
    "icepop upside down": ["importance={name: icepop, low: 5, high: 0.5}", "anchor=recompute"],
    "stale without threshold": ["stale_decisions.rule=drop"],
    "CISPO without bound": ["policy=cispo", "anchor=recompute"],
    "a turn clipped unevenly": ["policy=turn_is", "policy.clip_high=0.28", "anchor=recompute"],
    "overlong buffer without length": ["overlong_penalty.buffer=4"],
    "overlong buffer beyond length": ["overlong_penalty={buffer: 4, length: 3}"],
    "patience without warm-up": ["value.warmup.patience=2"],
    "a target for no KL": ["reference_kl.target=0.1"],
    "a method that is not there": ["policy=gsp"],
    "a method that cannot be imported": ["policy=no_such_package.losses:mine"],
    "a module's other things": ["policy=math:pi"],
}
"""What sections rule out: refused where it is read, with the key at fault."""


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_of_the_objective_are_refused(name: str) -> None:
    settings, match = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=re.escape(match)):
        load_config(None, [f"algorithm.{setting}" for setting in settings])


@pytest.mark.parametrize("name", UNREPRESENTABLE)
def test_what_no_section_holds_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"algorithm.{setting}" for setting in UNREPRESENTABLE[name]])
    assert str(caught.value.field).startswith("algorithm.")


def test_every_refusal_has_a_case() -> None:
    """And some case reaches each row before all others."""
    first = set()
    for settings, match in CONTRADICTIONS.values():
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"algorithm.{setting}" for setting in settings])
        assert match in str(caught.value)
        first.add(next(i for i, row in enumerate(REFUSALS) if _is_from(row, settings)))
    assert first == set(range(len(REFUSALS)))


def _is_from(row, settings: list[str]) -> bool:
    """Whether this row refuses these settings, all other rows left out."""
    loose: dict = {}
    for setting in settings:
        loose = _layered(loose, _override(f"algorithm.{setting}", loose))
    loose = loose["algorithm"]
    fields = {name: method_of(f"algorithm.{name}", loose[name]) for name in loose if f"algorithm.{name}" in KINDS}
    sections = {name: AlgorithmConfig.model_fields[name] for name in loose if name not in fields}
    parsed = {name: TypeAdapter(field.annotation).validate_python(loose[name]) for name, field in sections.items()}
    return bool(row.reason(AlgorithmConfig().model_copy(update=fields | parsed)))


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_is_refused_with_the_new_one(key: str) -> None:
    with pytest.raises(ConfigError, match="another name now") as caught:
        load_config(None, [f"{key}=1"])
    assert (caught.value.field, caught.value.setting) == (key, RENAMED[key])
    section = RENAMED[key].split(" ")[0].rstrip(",").rsplit(".", 1)[0]
    assert (
        section == "first_step_check" or section == "algorithm" or section.split(".")[1] in AlgorithmConfig.model_fields
    )


@pytest.mark.parametrize(("key", "value"), [("algorithm.rejection", "token"), ("algorithm.dynamic_sampling", "true")])
def test_an_old_value_of_a_key_that_is_a_section_now_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}={value}"])
    assert caught.value.setting == RESHAPED[key][1]


def test_a_layer_that_names_another_method_begins_its_section_anew(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("algorithm: {policy: {clip_high: 0.28}, anchor: {name: ewma, decay: 0.5}}")
    (tmp_path / "recipe.yaml").write_text("algorithm: {policy: gspo, estimator: grpo, anchor: recompute}")
    layered = load_config([tmp_path / "task.yaml", tmp_path / "recipe.yaml"]).algorithm
    assert (layered.policy.clip_high, layered.anchor.name) == (4e-4, "recompute")
    same = load_config(tmp_path / "task.yaml", ["algorithm.policy=ppo_clip", "algorithm.policy.clip_low=0.1"]).algorithm
    assert (same.policy.clip_low, same.policy.clip_high) == (0.1, 0.28)
    assert same.anchor.decay == 0.5


def test_a_configuration_is_read_without_torch() -> None:
    code = "import sys, megatron_rl.config as c; c.load_config(None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


def test_a_dumped_configuration_is_the_same_again(tmp_path: Path) -> None:
    for file in sorted(ROOT.glob("examples/**/*.yaml")):
        config = load_config(file, ["output=010: on #2", "rollout.environment_options.odd=1e-6"])
        (tmp_path / "dumped.yaml").write_text(dump_yaml(config.model_dump()))
        assert load_config(tmp_path / "dumped.yaml") == config
        assert RunConfig.model_validate(config.model_dump()) == config
        assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["performance.fp8=true"], "performance.fp8"),
        (["performance.moe_dispatcher=flex"], "moe_dispatcher"),
        (["performance.optimizer_cpu_offload=true"], "optimizer_cpu_offload"),
        (["performance.overlap_grad_reduce=true"], "overlap_grad_reduce"),
        (
            ["algorithm.estimator=grpo", "algorithm.anchor=recompute", "rollout.environment_options.maps_per_prompt=1"],
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
        asked = read_yaml_file(recipe)
        assert set(asked) == {"algorithm"}
        alone, together = load_config(recipe, ["algorithm.gamma=0.5"]).algorithm, config.algorithm
        for name, section in asked["algorithm"].items():
            if f"algorithm.{name}" in KINDS:
                named = section["name"] if isinstance(section, dict) else section
                assert getattr(together, name).name == named
            for option in section if isinstance(section, dict) else ():
                assert getattr(getattr(together, name), option) == getattr(getattr(alone, name), option)
            if not isinstance(section, dict) and name != "gamma":
                assert getattr(together, name) == getattr(alone, name)


def test_defaults_are_the_papers() -> None:
    ranges = {"ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "dis": (0.3, 5.0)}
    for name, expected in ranges.items():
        policy = method_of("algorithm.policy", name)
        assert (policy.clip_low, policy.clip_high) == expected
    assert all(method_of("algorithm.policy", name).clip == 0.2 for name in ("turn_ppo", "turn_is", "st_ppo"))
    assert method_of("algorithm.policy", {"name": "cispo", "clip_high": 2}).clip_low == 1.0
    assert AlgorithmConfig(policy={"clip_high": 0.28}).policy.clip_low == 0.2


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "absent.yaml")
    assert caught.value.file == tmp_path / "absent.yaml"


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        AlgorithmConfig().gamma = 0.5  # type: ignore[misc]


def test_every_setting_is_documented() -> None:
    def sections(annotation):
        members = typing.get_args(annotation) or (annotation,)
        return [member for member in members if isinstance(member, type) and issubclass(member, Section)]

    def undocumented(section, prefix=""):
        for name, field in section.model_fields.items():
            for inner in sections(field.annotation):
                yield from undocumented(inner, f"{prefix}{name}.")
            if not field.description and name != "name":
                yield prefix + name

    methods = [method for kind in KINDS.values() for method in kind.table.values()]
    assert len(methods) > 30 and all(method.__doc__ for method in methods)
    assert [bare for section in (RunConfig, *methods) for bare in undocumented(section)] == []


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("output=/data/run #2", "/data/run #2"), ("output=010", "010"), ("output=a: b", "a: b"),
        ("output=null", "null"), ("output='x y'", "x y"), ("optimizer.lr=1e-6", 1e-6), ("optimizer.lr=1", 1.0),
        ("seed=-3", -3),
        ("checkpoint.resume=true", True), ("rollout.engine_dtype=null", None),
        ("rollout.environment_options.x=on", "on"), ("rollout.environment_options.x=1.5", 1.5),
        ("rollout.environment_options={x: [1, no]}", {"x": [1, "no"]}),
    ],
)  # fmt: skip
def test_an_override_is_taken_as_written(override: str, value: object) -> None:
    found: object = load_config(None, [override])
    for part in override.partition("=")[0].split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "override",
    [
        "seed=010", "seed=0x10", "seed=1_000", "seed=1.0", "seed=true", "iterations=1e3",
        "iterations=99999999999999999999", "optimizer.lr=on", "optimizer.lr=true", "optimizer.lr='1'",
        "checkpoint.keep=true", "checkpoint.resume=yes",
        "checkpoint.resume=1", "output=[1]", "output=${oc.env:HOME}", "rollout.environment_options={a: [1,2}",
        'output="x', "output={a: 1, a: 2}",
    ],
)  # fmt: skip
def test_what_would_be_read_as_something_else_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value.field).startswith(override.partition("=")[0])


@pytest.mark.parametrize("override", ["noequals", "=3", "a..b=3", ".a=3"])
def test_what_is_no_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="not an override"):
        load_config(None, [override])


def test_no_setting_is_infinite_or_nan() -> None:
    for value in ("nan", "inf", "-inf", ".nan", ".inf"):
        for key in ("algorithm.entropy_coef", "optimizer.lr", "first_step_check.max_k3", "algorithm.policy.clip_low"):
            with pytest.raises(ConfigError, match=key):
                load_config(None, [f"{key}={value}"])
            with pytest.raises(ConfigError, match=key):
                load_config(None, [f"{key}={{a: {value}}}"])
    with pytest.raises(ValueError, match="finite"):
        AlgorithmConfig(entropy_coef=float("nan"))


FILES = {
    "a: {": "line 1", "seed: 1\nseed: 2": "line 2: 'seed' is set twice", "optimizer:\n  lr: 1\n  lr: 2": "line 3",
    "seed: 1\n---\nseed: 2": "a second document", "- a": "no mapping", "3": "no mapping",
    "x: &a [1]\ny: *a": "aliases are not read", "\tseed: 1": "line 1", "1: 2": "not text", "? [a]\n: b": "not text",
    "seed: !!python/object:os.system x": "constructor", 'output: "x': "line 1", "seed: 010": "whole number",
    "optimizer: {lr: on}": "a number", "checkpoint: {resume: yes}": "true or false", "output: 3": "string",
    "a: " + "[" * 5000: "too deep",
}  # fmt: skip


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_not_plain_yaml_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=FILES[text]) as caught:
        load_config(tmp_path / "run.yaml")
    assert caught.value.file == tmp_path / "run.yaml" and "\n" not in str(caught.value)


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    for name, match in (("pipe", "no regular file"), ("bytes", "UTF-8"), ("large", "too large"), ("none", "nothing")):
        with pytest.raises(ConfigError, match=match):
            load_config(tmp_path / f"{name}.yaml")
    with pytest.raises(ConfigError, match="a directory"):
        load_config(tmp_path)
