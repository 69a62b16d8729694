"""Layouts that do not divide are refused with both numbers and the nearest ones that would."""

from __future__ import annotations

import pytest

from megatron_rl.backend.topology import check_layout, check_model_fits
from megatron_rl.config import ParallelConfig
from megatron_rl.errors import ConfigError

MODEL = {"heads": 64, "kv_heads": 4, "experts": 128, "layers": 94, "ffn": 1536}


def test_fitting_layouts_pass() -> None:
    check_layout(ParallelConfig(tensor=4, pipeline=8, expert=16), 512)
    layout = ParallelConfig(tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11)
    check_model_fits(layout, **MODEL)


def test_world_that_does_not_divide() -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(ParallelConfig(tensor=2, pipeline=2), 6)
    assert "6 ranks" in caught.value.found and "= 4" in caught.value.found and "[4, 8]" in caught.value.expected


def test_expert_groups_that_do_not_divide() -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(ParallelConfig(expert=3), 8)
    assert "expert·expert_tensor = 3" in caught.value.found and "[1, 2, 4, 8]" in caught.value.expected


@pytest.mark.parametrize(
    ("layout", "found", "nearest"),
    [
        ({"tensor": 8}, "4 over 8", "[1, 2, 4]"),
        ({"expert": 48}, "128 over 48", "[16, 32, 64]"),
        ({"pipeline": 8}, "94 over 8", "[1, 2, 47]"),
        ({"expert_tensor": 5}, "1536 over 5", "[3, 4, 6]"),
    ],
)
def test_model_that_does_not_divide(layout: dict[str, int], found: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model_fits(ParallelConfig(**layout), **MODEL)
    assert caught.value.found == found and nearest in caught.value.expected
