"""The store: exact round trips, views instead of copies, named damage, and writers that die or meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.rollouts import (
    OUTCOMES,
    ModelFingerprint,
    RolloutHeader,
    SamplingTruth,
    Trajectory,
    read_batch,
    read_manifest,
    select_rows,
    trajectory_at,
    write_shard,
)
from megatron_rl.rollouts.store import is_committed, shard_paths
from tests.unit.rollouts.records import HEADER, MODEL, assert_same, routes_for, sound, write_tampered

FLOATS = st.floats(width=32)  # NaN and infinities included: storing is not judging


def array(draw: st.DrawFn, elements: st.SearchStrategy, dtype: type, size: int) -> np.ndarray:
    return np.array(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype)


def optional(draw: st.DrawFn, elements: st.SearchStrategy, dtype: type) -> np.ndarray | None:
    size = draw(st.sampled_from([None, 0, 1, 3]))
    return None if size is None else array(draw, elements, dtype, size)


@st.composite
def trajectories(draw: st.DrawFn, model: ModelFingerprint) -> Trajectory:
    length = draw(st.integers(1, 9))
    return Trajectory(
        trajectory_id=draw(st.text(max_size=4)),
        prompt_id=draw(st.text(max_size=4)),
        group_id=draw(st.text(max_size=4)),
        tokens=array(draw, st.integers(-(2**31), 2**31 - 1), np.int32, length),
        action_mask=array(draw, st.booleans(), np.bool_, length),
        turn_id=array(draw, st.integers(-1, 32767), np.int16, length),
        logprobs=array(draw, FLOATS, np.float32, length),
        version=array(draw, st.integers(-5, 2**31 - 1), np.int32, length),
        turn_rewards=array(draw, FLOATS, np.float32, draw(st.integers(0, 3))),
        reward=draw(FLOATS),
        outcome=draw(st.sampled_from(OUTCOMES)),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        boundary_tokens=optional(draw, st.integers(0, 31), np.int32),
        reward_vector=optional(draw, FLOATS, np.float32),
        routes=routes_for(length, model, draw(st.integers(0, 99))) if draw(st.booleans()) else None,
        metadata=draw(st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(), st.text(max_size=3)))),
    )


MODELS = st.sampled_from(
    [MODEL, replace(MODEL, num_experts=300, topk=4), replace(MODEL, num_experts=0, topk=0, moe_layers=())]
)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_was_written_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    model = data.draw(MODELS)
    header = RolloutHeader(model, SamplingTruth(0.7, 0.9, 5, "raw"), engine="any/2")
    shards = data.draw(st.lists(st.lists(trajectories(model), max_size=4), min_size=1, max_size=3))
    directory = tmp_path_factory.mktemp("shards")
    infos = [write_shard(directory, header, shard, name=f"{number}") for number, shard in enumerate(shards)]
    batch = read_batch(directory)
    everything = [trajectory for shard in shards for trajectory in shard]
    assert batch.header == header
    assert read_manifest(directory) == tuple(infos)
    assert sum(info.tokens for info in infos) == len(batch.tokens)
    for row, trajectory in enumerate(everything):
        assert_same(trajectory_at(batch, row), trajectory)
    chosen = data.draw(st.lists(st.integers(0, len(everything) - 1), max_size=5)) if everything else []
    some = select_rows(batch, chosen)
    for row, source in enumerate(chosen):
        assert_same(trajectory_at(some, row), everything[source])
        assert some.sources[row] == batch.sources[source]


def test_null_and_empty_boundary_stay_apart(tmp_path: Path) -> None:
    empty = np.empty(0, np.int32)
    write_shard(tmp_path, HEADER, [sound(0), sound(1, boundary_tokens=empty), sound(2, boundary_tokens=empty + 1)])
    batch = read_batch(tmp_path)
    assert batch.boundary_known.tolist() == [False, True, True]
    assert trajectory_at(batch, 0).boundary_tokens is None
    assert trajectory_at(batch, 1).boundary_tokens is not None


def file_mappings(path: Path) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux /proc")
def test_columns_of_one_shard_and_all_routes_are_views_of_the_file(tmp_path: Path) -> None:
    for name in "ab":
        write_shard(tmp_path, HEADER, [sound(0), sound(1)], name=name)
    one, both = read_batch(tmp_path / "a.arrow"), read_batch(tmp_path)
    mapped = file_mappings(tmp_path / "a.arrow") + file_mappings(tmp_path / "b.arrow")
    for values in (one.tokens, one.turn_id, one.logprobs, one.version, one.turn_rewards, *one.routes, *both.routes):
        assert any(begin <= values.ctypes.data < end for begin, end in mapped)
        assert not values.flags.writeable


def test_nothing_read_can_be_written_to(tmp_path: Path) -> None:
    for name in "ab":
        write_shard(tmp_path, HEADER, [sound(0)], name=name)
    for batch in (read_batch(tmp_path / "a.arrow"), read_batch(tmp_path), select_rows(read_batch(tmp_path), [1])):
        for values in (batch.tokens, batch.action_mask, batch.logprobs, batch.reward, batch.terminated):
            assert not values.flags.writeable


def test_shard_is_plain_arrow_with_routes_layer_major(tmp_path: Path) -> None:
    trajectory = sound()
    write_shard(tmp_path, HEADER, [trajectory], name="plain")
    table = pa.ipc.open_file((tmp_path / "plain.arrow").read_bytes()).read_all()
    assert table.column("routes")[0].as_py() == trajectory.routes.tobytes()
    assert json.loads(table.schema.metadata[b"megatron_rl.fingerprint"])["num_experts"] == 8
    assert table.schema.metadata[b"megatron_rl.route_dtype"] == b"uint8"


# -- damage is named


def test_torn_shard(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound()], name="torn")
    path = tmp_path / "torn.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(RolloutError, match="torn") as caught:
        read_batch(tmp_path)
    assert (caught.value.file, caught.value.field) == (path, "bytes")
    assert (caught.value.found, caught.value.expected) == (len(whole) - 100, len(whole))
    (tmp_path / "torn.arrow.json").unlink()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RolloutError, match="torn") as caught:
            read_batch(path)
        assert caught.value.file == path


def test_checksum_failure(tmp_path: Path) -> None:
    info = write_shard(tmp_path, HEADER, [sound()], name="flipped")
    path = tmp_path / "flipped.arrow"
    content = bytearray(path.read_bytes())
    content[content.index(sound().routes.tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(RolloutError, match="checksum") as caught:
        read_batch(tmp_path)
    assert (caught.value.file, caught.value.expected) == (path, info.xxh3_128)
    assert len(read_batch(tmp_path, verify_checksums=False)) == 1


def test_offsets_that_leave_the_file_are_refused_without_checksums(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(), sound(1)], name="offsets")
    path = tmp_path / "offsets.arrow"
    content = path.read_bytes()
    offsets = np.array([0, 7, 14], np.int32).tobytes()
    path.write_bytes(content.replace(offsets, np.array([0, 7, 1 << 30], np.int32).tobytes(), 1))
    with pytest.raises(RolloutError, match="damaged") as caught:
        read_batch(tmp_path, verify_checksums=False)
    assert caught.value.file == path


def rewrite(path: Path, change) -> None:
    table = change(pa.ipc.open_file(path.read_bytes()).read_all())
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    (path.parent / (path.name + ".json")).unlink()


def test_files_of_several_record_batches(tmp_path: Path) -> None:
    """Ours hold one; another writer's may hold more, and rows count through the file."""
    rows = [sound(number) for number in range(5)]
    write_shard(tmp_path, HEADER, rows, name="a")
    path = tmp_path / "a.arrow"
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (tmp_path / "a.arrow.json").unlink()
    batch = read_batch(path)
    assert batch.sources == tuple((str(path), row) for row in range(5))
    for row, trajectory in enumerate(rows):
        assert_same(trajectory_at(batch, row), trajectory)


def test_another_format_version(tmp_path: Path) -> None:
    write_shard(tmp_path, replace(HEADER, format_version=2), [sound()], name="newer")
    with pytest.raises(RolloutError) as caught:
        read_batch(tmp_path)
    assert (caught.value.field, caught.value.found, caught.value.expected) == ("format_version", "2", 1)
    assert caught.value.file.endswith("newer.arrow")


WIDE = pa.list_(pa.int64())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda table: table.drop_columns(["version"]), "no such column"),
        (
            lambda table: table.set_column(7, "version", table["version"].cast(pa.list_(pa.int64()))),
            pa.list_(pa.int64()),
        ),
    ],
)
def test_wrong_schema(tmp_path: Path, change, found: object) -> None:
    write_shard(tmp_path, HEADER, [sound()], name="odd")
    rewrite(tmp_path / "odd.arrow", change)
    with pytest.raises(RolloutError, match="schema") as caught:
        read_batch(tmp_path / "odd.arrow")
    assert (caught.value.field, caught.value.found) == ("version", found)
    assert caught.value.expected == pa.list_(pa.int32())


def test_a_foreign_arrow_file(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound()], name="odd")
    rewrite(tmp_path / "odd.arrow", lambda table: table.replace_schema_metadata(None))
    with pytest.raises(RolloutError) as caught:
        read_batch(tmp_path / "odd.arrow")
    assert (caught.value.field, caught.value.expected) == ("format_version", 1)


def test_shards_of_different_headers(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound()], name="a")
    write_shard(tmp_path, replace(HEADER, engine="other/2"), [sound()], name="b")
    with pytest.raises(RolloutError, match="differ") as caught:
        read_batch(tmp_path)
    assert (caught.value.file, caught.value.field, caught.value.found) == (tmp_path / "b.arrow", "engine", "other/2")


@pytest.mark.parametrize(
    ("column", "value", "kind", "found", "expected"),
    [
        ("action_mask", [False] * 6, RolloutError, 6, 7),
        ("turn_id", [-1] * 8, RolloutError, 8, 7),
        ("logprobs", [], RolloutError, 0, 7),
        ("version", [0] * 6, RolloutError, 6, 7),
        ("version", None, RolloutError, "null", pa.list_(pa.int32())),
        ("logprobs", [0.0] * 6 + [None], RolloutError, "null", pa.list_(pa.float32())),
        ("metadata", "[1]", RolloutError, "[1]", "a JSON object"),
        ("routes", bytes(2 * 6 * 2), RouteError, "2 layers", "3 MoE layers"),
        ("routes", bytes(3 * 7 * 2), RouteError, "7 rows", "6 rows (tokens - 1)"),
        ("routes", bytes(5), RouteError, "5 bytes", "36 bytes"),
    ],
)
def test_rows_that_cannot_be_laid_out(
    tmp_path: Path, column: str, value: object, kind: type, found: object, expected: object
) -> None:
    path = write_tampered(tmp_path, column, {1: value})
    with pytest.raises(kind) as caught:
        read_batch(tmp_path)
    error = caught.value
    assert (error.file, error.row, error.field, error.setting) == (str(path), 1, column, "rollout.on_bad_record")
    assert (error.found, error.expected) == (found, expected)
    refused: list[RolloutError] = []
    batch = read_batch(tmp_path, refused=refused)
    assert [error.row for error in refused] == [1]
    assert batch.sources == ((str(path), 0), (str(path), 2))
    for row, number in enumerate((0, 2)):
        assert_same(trajectory_at(batch, row), sound(number))


def test_trajectory_without_tokens(tmp_path: Path) -> None:
    nothing = {name: getattr(sound(), name)[:0] for name in ("tokens", "action_mask", "turn_id", "logprobs", "version")}
    write_shard(tmp_path, HEADER, [sound(), sound(1, **nothing, routes=None)], name="a")
    with pytest.raises(RolloutError, match="no tokens") as caught:
        read_batch(tmp_path)
    assert (caught.value.row, caught.value.field, caught.value.found) == (1, "tokens", 0)


@pytest.mark.parametrize(
    ("change", "field", "found"),
    [
        ({"tokens": np.zeros(7, np.int64)}, "tokens", "int64[7]"),
        ({"action_mask": np.zeros(6, bool)}, "action_mask", 6),
        ({"turn_rewards": np.zeros(2)}, "turn_rewards", "float64[2]"),
        ({"boundary_tokens": np.zeros((1, 1), np.int32)}, "boundary_tokens", "int32[1, 1]"),
        ({"routes": routes_for(7)[:2]}, "routes", "uint8[2, 6, 2]"),
        ({"routes": routes_for(7).astype(np.int32)}, "routes", "int32[3, 6, 2]"),
        ({"outcome": "fine"}, "outcome", "fine"),
        ({"metadata": {"set": {1}}}, "metadata", None),
    ],
)
def test_writer_refuses_what_columns_cannot_hold(tmp_path: Path, change: dict, field: str, found: object) -> None:
    with pytest.raises(RolloutError) as caught:
        write_shard(tmp_path, HEADER, [sound(), sound(1, **change)], name="bad")
    assert (caught.value.row, caught.value.field, caught.value.file) == (1, field, tmp_path / "bad.arrow")
    assert found is None or caught.value.found == found
    assert list(tmp_path.iterdir()) == []


# -- the manifest


def test_manifest_merges_what_a_race_lost(tmp_path: Path) -> None:
    infos = [write_shard(tmp_path, HEADER, [sound()], name=name) for name in "ab"]
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert [line["file"] for line in content["shards"]] == ["a.arrow", "b.arrow"]
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": content["shards"][:1]}))
    assert read_manifest(tmp_path) == tuple(infos)


def test_lost_shard_is_named(tmp_path: Path) -> None:
    for name in "ab":
        write_shard(tmp_path, HEADER, [sound()], name=name)
    (tmp_path / "b.arrow").unlink()
    with pytest.raises(RolloutError, match="missing") as caught:
        read_batch(tmp_path)
    assert caught.value.file == tmp_path / "b.arrow"
    (tmp_path / "b.arrow.json").unlink()
    with pytest.raises(RolloutError, match="missing") as caught:
        read_batch(tmp_path)
    assert caught.value.file == tmp_path / "b.arrow"


@pytest.mark.parametrize("content", ["{", "[]", '{"file": 1}'])
def test_unreadable_entry(tmp_path: Path, content: str) -> None:
    write_shard(tmp_path, HEADER, [sound()], name="a")
    (tmp_path / "a.arrow.json").write_text(content)
    with pytest.raises(RolloutError, match="manifest") as caught:
        read_batch(tmp_path)
    assert caught.value.file == tmp_path / "a.arrow.json"


def test_names_are_used_once(tmp_path: Path) -> None:
    write_shard(tmp_path, HEADER, [sound(0)], name="a")
    with pytest.raises(RolloutError, match="exists") as caught:
        write_shard(tmp_path, HEADER, [sound(1)], name="a")
    assert caught.value.file == tmp_path / "a.arrow"
    assert_same(trajectory_at(read_batch(tmp_path), 0), sound(0))


def test_directory_without_shards(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no committed shard"):
        read_batch(tmp_path)
    with pytest.raises(RolloutError, match="missing"):
        read_batch(tmp_path / "absent.arrow")


# -- writers that die, meet a full disk, or meet each other


def test_contents_are_durable_before_their_name_and_the_name_before_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace_file = os.replace

    def fsync(descriptor: int) -> None:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append("sync directory" if target == str(tmp_path) else "sync file")

    def rename(source: Path, target: Path) -> None:
        events.append(f"name {target.name}")
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    write_shard(tmp_path, HEADER, [sound()], name="a")
    steps = [["sync file", f"name {name}", "sync directory"] for name in ("a.arrow", "a.arrow.json", "manifest.json")]
    assert events == sum(steps, [])


def start(code: str, *arguments: object) -> subprocess.Popen:
    prelude = "import sys\nfrom tests.unit.rollouts.records import *\n"
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)


KILLED = """
import os, signal
real, left = os.replace, int(sys.argv[2])
def dying(source, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real(source, target)
os.replace = dying
write_shard(sys.argv[1], HEADER, [sound(1)], name="killed")
"""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_writer_leaves_no_half_shard(tmp_path: Path, renames: int) -> None:
    """Killed before the rename of the shard, of its entry, or of the manifest."""
    write_shard(tmp_path, HEADER, [sound(0)], name="earlier")
    assert start(KILLED, tmp_path, renames).wait(60) == -signal.SIGKILL
    batch = read_batch(tmp_path)
    assert len(batch) == (2 if renames == 2 else 1)  # the entry is what commits
    assert_same(trajectory_at(batch, 0), sound(0))
    assert (tmp_path / "killed.arrow").exists() == (renames > 0)
    if renames < 2:
        write_shard(tmp_path, HEADER, [sound(1)], name="killed")  # the writer's second life
        assert len(read_batch(tmp_path)) == 2


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
from megatron_rl.errors import RolloutError
try:
    write_shard(sys.argv[1], HEADER, [sound(1)] * 50, name="large")
except RolloutError as error:
    sys.exit(7 if "could not be written" in str(error) and "large.arrow" in str(error.file) else 8)
"""


@pytest.mark.parametrize("limit", [100, 5000])
def test_full_disk_leaves_no_half_shard(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE makes write(2) fail as a full disk does."""
    write_shard(tmp_path, HEADER, [sound(0)], name="earlier")
    before = sorted(tmp_path.iterdir())
    assert start(FULL, tmp_path, limit).wait(60) == 7
    assert sorted(tmp_path.iterdir()) == before
    assert_same(trajectory_at(read_batch(tmp_path), 0), sound(0))


WRITER = """
for number in range(4):
    write_shard(sys.argv[1], HEADER, [sound(number)], name=f"{number}-{sys.argv[2]}")
"""


def test_two_writers_at_once(tmp_path: Path) -> None:
    writers = [start(WRITER, tmp_path, rank) for rank in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    batch = read_batch(tmp_path)
    assert len(batch) == 8
    for row in range(8):
        assert_same(trajectory_at(batch, row), sound(row // 2))
    json.loads((tmp_path / "manifest.json").read_text())
    assert not list(tmp_path.glob(".*"))


def test_shards_are_listed_by_folder_and_name(tmp_path: Path) -> None:
    for folder, name in (("b", "1"), ("a", "2"), ("a/deep", "0"), ("a", "1")):
        write_shard(tmp_path / folder, HEADER, [sound()], name=name)
    (tmp_path / "a/stray.arrow").touch()

    def listed(folder: str, **how) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in shard_paths(tmp_path / folder, **how)]

    assert listed("a") == ["a/1.arrow", "a/2.arrow"]
    assert listed("a", committed=False) == ["a/1.arrow", "a/2.arrow", "a/stray.arrow"]
    assert listed(".", folders="*") == ["a/1.arrow", "a/2.arrow", "b/1.arrow"]
    assert listed(".", folders="**") == ["a/1.arrow", "a/2.arrow", "a/deep/0.arrow", "b/1.arrow"]
    assert listed("absent") == listed("absent", folders="*") == []
    assert is_committed(tmp_path / "a", "1") and not is_committed(tmp_path / "a", "stray")
