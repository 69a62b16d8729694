"""The configuration refuses what it does not know and what contradicts, and says which setting to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config import AlgorithmConfig, RunConfig, load_config
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


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"], "different objectives"),
        (["algorithm.token_is_cap=2", "algorithm.sequence_is_cap=2"], "twice"),
        (["algorithm.dual_clip=3"], "decoupled loss"),
        (["algorithm.aggregation=constant"], "aggregation_constant"),
        (["performance.fp8=true"], "performance.fp8"),
        (["performance.moe_dispatcher=flex"], "moe_dispatcher"),
        (["performance.optimizer_cpu_offload=true"], "optimizer_cpu_offload"),
        (["performance.overlap_grad_reduce=true"], "overlap_grad_reduce"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(None, overrides)


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
