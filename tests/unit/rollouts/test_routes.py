"""Routes against slow, obvious loops, and the properties the module promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RouteError
from megatron_rl.rollouts import read_batch, write_shard
from megatron_rl.rollouts import routes as module
from megatron_rl.rollouts.routes import (
    agreement,
    coverage,
    expert_load,
    from_engine,
    missing_sentinel,
    moe_layer_map,
    padding_rows,
    required_rows,
    route_dtype,
    slice_routes,
    stage_layers,
)


@pytest.mark.parametrize(
    ("experts", "dtype", "sentinel"),
    [(0, np.uint8, 255), (8, np.uint8, 255), (255, np.uint8, 255), (256, np.uint16, 65535), (65535, np.uint16, 65535)],
)
def test_smallest_type_that_leaves_room_for_missing(experts: int, dtype: type, sentinel: int) -> None:
    assert route_dtype(experts) == dtype
    assert missing_sentinel(route_dtype(experts)) == sentinel
    assert experts - 1 < sentinel


def test_too_many_experts() -> None:
    with pytest.raises(RouteError) as caught:
        route_dtype(65536)
    assert (caught.value.field, caught.value.found) == ("num_experts", 65536)


@settings(deadline=None)
@given(st.integers(1, 70), st.data())
def test_padding_is_distinct_and_even(experts: int, data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, experts))
    start, first, second = (data.draw(st.integers(0, 20)) for _ in range(3))
    rows = padding_rows(first + second, experts, topk, start)
    assert rows.shape == (first + second, topk) and rows.dtype == route_dtype(experts)
    for row in rows:
        assert len(set(row.tolist())) == topk and row.max() < experts
    load = np.bincount(rows.ravel(), minlength=experts)
    assert load.max() - load.min() <= 1
    split = [padding_rows(first, experts, topk, start), padding_rows(second, experts, topk, start + first)]
    np.testing.assert_array_equal(rows, np.concatenate(split))


def test_one_padding_row_reaches_every_expert_parallel_rank() -> None:
    (row,) = padding_rows(1, 128, 8)
    assert sorted(row // 16) == list(range(8))  # 8 ranks of 128 / 8 = 16 experts


@pytest.mark.parametrize("topk", [0, 5])
def test_padding_needs_enough_experts(topk: int) -> None:
    with pytest.raises(RouteError) as caught:
        padding_rows(1, 4, topk)
    assert (caught.value.field, caught.value.found) == ("topk", topk)


@st.composite
def two_routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    layers, rows, topk = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.integers(1, 3))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    recorded, native = (generator.random((layers, rows, 5)).argsort(axis=-1)[..., :topk] for _ in range(2))
    recorded = recorded.astype(np.uint8)
    recorded[generator.random((layers, rows)) < 0.3] = 255
    native[generator.random((layers, rows)) < 0.3] = 255  # as in a second recording
    return recorded, native


@settings(deadline=None)
@given(two_routings())
def test_agreement_counts_shared_ids_of_present_rows(routings: tuple[np.ndarray, np.ndarray]) -> None:
    recorded, native = routings
    agreeing, total = agreement(recorded, native)
    for layer in range(len(recorded)):
        pairs = [(set(a), set(b)) for a, b in zip(recorded[layer].tolist(), native[layer].tolist(), strict=True)]
        present = [(ours, theirs) for ours, theirs in pairs if ours != {255}]
        assert agreeing[layer] == sum(len(ours & theirs) for ours, theirs in present)
        assert total[layer] == sum(len(ours) for ours, _ in present)


def test_agreement_needs_one_shape() -> None:
    with pytest.raises(RouteError) as caught:
        agreement(np.zeros((1, 2, 2), np.uint8), np.zeros((1, 3, 2), np.uint8))
    assert (caught.value.found, caught.value.expected) == ((1, 3, 2), (1, 2, 2))


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=8))
def test_required_rows_end_before_the_last_decision(mask: list[bool]) -> None:
    positions = [position for position, sampled in enumerate(mask) if sampled]
    assert required_rows(np.array(mask, bool)) == (positions[-1] if positions else 0)


@settings(deadline=None)
@given(two_routings(), st.data())
def test_coverage_counts_present_required_rows(routings: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    recorded, _ = routings
    rows = recorded.shape[1]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=rows + 1, max_size=rows + 1)))
    covered, required = coverage(recorded, mask)
    assert required == required_rows(mask)
    for layer, rows_of_layer in enumerate(recorded):
        assert covered[layer] == sum(row.tolist() != [255] * len(row) for row in rows_of_layer[:required])


def test_expert_load_leaves_missing_rows_out() -> None:
    routes = np.array([[[0, 2], [255, 255]], [[2, 1], [2, 0]]], np.uint8)
    np.testing.assert_array_equal(expert_load(routes, 3), [[1, 0, 1], [1, 1, 2]])


def test_layer_map_and_stages() -> None:
    layers = (1, 2, 4, 5)
    assert moe_layer_map(layers) == {1: 0, 2: 1, 4: 2, 5: 3}
    assert [stage_layers(layers, first, first + 2) for first in (0, 2, 4)] == [slice(0, 1), slice(1, 2), slice(2, 4)]
    assert stage_layers((4, 5), 0, 4) == slice(0, 0)


@pytest.mark.parametrize("layers", [(1, 1), (2, 1), (-1, 0)])
def test_layers_out_of_order(layers: tuple[int, ...]) -> None:
    with pytest.raises(RouteError) as caught:
        moe_layer_map(layers)
    assert (caught.value.field, caught.value.found) == ("moe_layers", layers)


def test_slices_are_copies_and_prefetch_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    view = np.arange(4 * 5 * 2, dtype=np.uint8).reshape(4, 5, 2)
    view.flags.writeable = False
    asked: list[np.ndarray] = []
    monkeypatch.setattr(module, "prefetch", asked.append)
    part = slice_routes(view, slice(1, 3), slice(2, 4))
    np.testing.assert_array_equal(part, view[1:3, 2:4])
    assert part.flags.writeable and part.flags.c_contiguous and not np.shares_memory(part, view)
    assert [wanted.nbytes for wanted in asked] == [part.nbytes]


# -- what engines return


def engine_routes(rows: int = 4, layers: int = 2) -> np.ndarray:
    return np.random.default_rng(0).random((rows, layers, 6)).argsort(axis=-1)[..., :2]


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8])
def test_all_layers_and_moe_layers_only_become_the_same(dtype: type) -> None:
    options = {"num_layers": 4, "moe_layers": (1, 3), "num_experts": 6, "rows": 4}
    every = np.zeros((4, 4, 2), dtype)
    every[:, [1, 3]] = engine_routes()
    converted = from_engine(every, **options)
    np.testing.assert_array_equal(converted, engine_routes().transpose(1, 0, 2))
    np.testing.assert_array_equal(converted, from_engine(engine_routes().astype(dtype), **options))
    assert converted.dtype == np.uint8 and converted.flags.c_contiguous


def test_rows_never_fed_and_rows_marked_absent_are_missing() -> None:
    routes = engine_routes()
    routes[1, 0] = -1
    converted = from_engine(routes, num_layers=4, moe_layers=(1, 3), num_experts=6, rows=6)
    absent = (converted == 255).all(axis=-1)
    np.testing.assert_array_equal(absent, [[0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("routes", "rows", "found"),
    [
        (engine_routes(layers=3), 4, "shape (4, 3, 2)"),
        (engine_routes()[:, :, 0], 4, "shape (4, 2)"),
        (engine_routes(rows=5), 4, 5),
        (np.array([[[0, 6], [0, 1]]]), 1, "[0, 6] in MoE layer 0"),
        (np.array([[[0, 1], [0, -1]]]), 1, "[0, -1] in MoE layer 1"),
        (np.array([[[0, 1], [0, -2]]]), 1, "[0, -2] in MoE layer 1"),
        (np.array([[[0, 1], [0, 255]]], np.uint8), 1, "[0, 255] in MoE layer 1"),
    ],
)
def test_anything_else_an_engine_returns_is_refused(routes: np.ndarray, rows: int, found: object) -> None:
    with pytest.raises(RouteError) as caught:
        from_engine(routes, num_layers=4, moe_layers=(1, 3), num_experts=6, rows=rows)
    assert (caught.value.field, caught.value.found) == ("routes", found)


def test_a_stage_reads_a_quarter_of_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bench = runpy.run_path(str(Path(__file__).parents[3] / "tools/bench/routes.py"))
    batch = [bench["synthetic"](number, 64) for number in range(2)]
    total = sum(trajectory.routes.nbytes for trajectory in batch)
    assert total == 2 * 63 * 94 * 8  # 8 bytes per token and layer
    info = write_shard(tmp_path, bench["header"](), batch)
    for stage, layers in enumerate((24, 24, 23, 23)):
        bench["read_as_stage"](tmp_path / info.file, stage, 0, 1)
        sliced, resident, faulted, _ = map(float, capsys.readouterr().out.split())
        assert sliced == total * layers // 94 <= 0.27 * total
        assert 0 < faulted <= resident


def test_only_columns_and_the_slice_are_paged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own account: what of the file its page cache holds after one stage of four was read."""
    monkeypatch.undo()  # only pages that reached the disk can be dropped
    bench = runpy.run_path(str(Path(__file__).parents[3] / "tools/bench/routes.py"))
    batch = [bench["synthetic"](number, 1024) for number in range(2)]
    path = tmp_path / write_shard(tmp_path, bench["header"](), batch).file
    bench["drop_cache"](path)
    if bench["resident_bytes"](path):
        pytest.skip("this file system keeps its pages")
    for routes in read_batch(path, verify_checksums=False).routes:
        slice_routes(routes, slice(24, 48))
    assert bench["resident_bytes"](path) < 0.35 * path.stat().st_size
