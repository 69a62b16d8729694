"""Every family through live Megatron models under each kind of layout: bit-exact round trips, readings and gradients
equal to transformers' own. One table at the end says how far apart they are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.hf.logits import compare_logits
from tests.dist.pool import RankFailure, RankPool
from tests.hf import live
from tests.hf.models import FAMILIES, write_model

GRADIENTS = 1e-6
"""Largest accepted difference of any entry of any gradient from transformers' in float32."""

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "tp2 pp2 ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
    "ep2 etp2": (4, {"expert": 2, "expert_tensor": 2}, {}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "uneven pp2": (2, {"pipeline": 2, "first_stage_layers": 1}, {}),
    "cp2 ep2": (2, {"context": 2, "expert": 2}, {}),
    "tied tp2 pp2": (4, {"tensor": 2, "pipeline": 2}, {"tie_word_embeddings": True}),
    "odd vocab tp2": (2, {"tensor": 2}, {"vocab_size": 61}),
}
"""Name → world, layout, changes of the model."""
DENSE = ("qwen3", "llama")
COVERING = {
    "qwen3_moe": ("ep2 etp2", "tied tp2 pp2"),
    "qwen2_moe": ("tp2 pp2 ep2",),
    "mixtral": ("uneven pp2",),
    "olmoe": ("odd vocab tp2",),
    "glm4_moe": ("tp2 pp2 ep2",),
    "deepseek_v3": ("tp2 pp2 ep2", "pp2 vpp2"),
    "deepseek_v2": ("cp2 ep2",),
    "gpt_oss": ("tp2 pp2 ep2", "cp2 ep2"),
    "qwen3": ("odd vocab tp2",),
    "llama": ("pp2 vpp2",),
}
"""What runs every time; every layout and every family is in it."""


def _applies(family: str, layout: str) -> bool:
    parallel = LAYOUTS[layout][1]
    refused = family == "gpt_oss" and "expert_tensor" in parallel
    return not refused and (family not in DENSE or "expert" not in parallel)


def _cases() -> list[Any]:
    pairs = [(family, layout) for family in FAMILIES for layout in LAYOUTS if _applies(family, layout)]
    return [
        pytest.param(*pair, id=" ".join(pair), marks=() if pair[1] in COVERING[pair[0]] else pytest.mark.full)
        for pair in pairs
    ]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict]]:
    """A family's checkpoint and transformers' gradients of it, made on first use."""
    made: dict[str, tuple[Path, dict]] = {}

    def get(family: str, **changes: Any) -> tuple[Path, dict]:
        key = f"{family} {changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            path = write_model(folder / "model", family, **changes)
            made[key] = path, live.tensors(live.transformers_gradients(path, folder / "gradients"))
        return made[key]

    return get


def test_every_layout_is_covered() -> None:
    assert COVERING.keys() == FAMILIES.keys()
    assert {layout for chosen in COVERING.values() for layout in chosen} | {"one rank"} == LAYOUTS.keys()


@pytest.mark.parametrize(("family", "layout"), _cases())
def test_family(ranks: RankPool, checkpoint, keep_row, tmp_path: Path, family: str, layout: str) -> None:
    world, parallel, changes = LAYOUTS[layout]
    path, gradients = checkpoint(family, **changes)
    outcomes = ranks.run(live.through_megatron, world, path, tmp_path / "out", parallel)
    tokens = live.tokens(changes.get("vocab_size", FAMILIES[family]["vocab_size"]))
    reports = [compare_logits(outcome.readings, path, tokens) for outcome in outcomes]
    worst = max(report.worst for report in reports)
    different = live.different_tensors(tmp_path / "out", path)
    error, name = live.gradient_error(outcomes[0].gradients, gradients)
    lane = f"megatron-core {version('megatron-core')}"
    keep_row(family, layout, f"{len(different)} differ" if different else "bit-exact", worst, error, lane)
    assert different == []
    assert worst <= live.READINGS, reports
    assert error <= GRADIENTS, name


def test_critic_keeps_its_head(ranks: RankPool, checkpoint, tmp_path: Path) -> None:
    path, _ = checkpoint("qwen3_moe")
    world, parallel, _ = LAYOUTS["tp2 pp2 ep2"]

    def run(ranks_used: int, source: Path, target: str, layout: dict[str, Any]):
        arguments = (source, tmp_path / target, layout, "value", False)
        return ranks.run(live.through_megatron, ranks_used, *arguments)[0].readings

    fresh, again = run(world, path, "critic", parallel), run(1, tmp_path / "critic", "critic2", {})
    assert fresh.abs().max() > 0 and (fresh - again).abs().max() <= 1e-5
    assert live.different_tensors(tmp_path / "critic2", tmp_path / "critic") == []
    critic = live.tensors(tmp_path / "critic")
    assert critic["score.weight"].shape == (1, 48) and critic["score.weight"].abs().min() > 0
    backbone = {name: tensor for name, tensor in live.tensors(path).items() if name != "lm_head.weight"}
    assert all(live.same(critic, backbone, name) for name in backbone)


@pytest.mark.parametrize(("family", "word"), [("qwen2_moe", "shared expert's width"), ("llama", "dense intermediate")])
def test_a_width_that_does_not_divide_is_refused(ranks: RankPool, tmp_path: Path, family: str, word: str) -> None:
    odd = {"shared_expert_intermediate_size": 41} if family == "qwen2_moe" else {"intermediate_size": 81}
    path = write_model(tmp_path / "odd", family, **odd)
    with pytest.raises(RankFailure, match=rf"{word}.*parallel\.tensor"):
        ranks.run(live.through_megatron, 2, path, tmp_path / "out", {"tensor": 2})
