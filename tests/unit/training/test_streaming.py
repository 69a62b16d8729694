"""What an iteration takes from the stream, what a rollout process plays next, and how shards reach the disk."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import resource
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.errors import RolloutError
from megatron_rl.rollout_worker.scheduler import EpisodeScheduler, ScheduledEpisode
from megatron_rl.rollout_worker.shard_writer import ShardWriter, recorded_ids
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutHeader, SamplingTruth, Trajectory
from megatron_rl.rollouts.store import read_batch, write_shard
from megatron_rl.training.rollout_sources.trajectory_buffer import Row, TrajectoryBuffer, choose

HEADER = RolloutHeader(ModelFingerprint("qwen3_moe", 32, 4, 2, (0,), "t"), SamplingTruth(), "test")


def row(number: int, oldest: int = 0, newest: int | None = None, group: str | None = None, size: int = 1) -> Row:
    return Row("f", number, group or f"g{number}", size, oldest, oldest if newest is None else newest)


def numbers(rows: list[Row]) -> list[int]:
    return [found.row for found in rows]


def pick(rows: list[Row], count: int, version: int = 2, **changes) -> tuple[list[int], list[int]]:
    settings = {"staleness": 1, "whole_groups": True, "drop": True} | changes
    chosen, expired = choose(rows, count=count, version=version, **settings)
    return numbers(chosen), numbers(expired)


def test_the_oldest_come_first_and_of_equals_the_first_found() -> None:
    assert pick([row(0, 2), row(1, 1), row(2, 2), row(3, 1)], 3) == ([1, 3, 0], [])


def test_fewer_than_asked_for_are_not_taken() -> None:
    assert pick([row(0, 2)], 2) == ([], [])


def test_too_old_is_given_up_or_delivered() -> None:
    rows = [row(0, 0), row(1, 1), row(2, 2)]
    assert pick(rows, 2) == ([1, 2], [0])
    assert pick(rows, 2, drop=False) == ([0, 1], [])


def test_what_is_younger_than_the_trainer_waits() -> None:
    assert pick([row(0, 2, newest=3), row(1, 2)], 1) == ([1], [])


def test_groups_are_taken_whole_or_not_at_all() -> None:
    rows = [row(0, 1, group="a", size=2), row(1, 2, group="b", size=2), row(2, 2, group="b", size=2)]
    assert pick(rows, 2) == ([1, 2], [])
    assert pick(rows, 2, whole_groups=False) == ([0, 1], [])
    assert pick([*rows, row(3, 2, group="a", size=2)], 3) == ([0, 3, 1, 2], [])


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    rows = [row(0, 0, group="a", size=2), row(1, 2, group="a", size=2), row(2, 2)]
    assert pick(rows, 1) == ([2], [0, 1])


def test_of_a_group_that_is_too_old_nothing_waits_on(tmp_path: Path) -> None:
    old, late = row(0, 0, group="a", size=2), row(1, 2, group="a", size=2)
    assert pick([old], 1) == ([], [0])
    index = TrajectoryBuffer(tmp_path, tmp_path, (), skip_damaged=False)
    for found in (old, late):
        index.waiting.append(found)
        assert index.take(1, 2, 1, whole_groups=True, drop=True) == []
    assert index.waiting == [] and index.expired == 2


def test_groups_that_lack_a_member_for_ever_are_given_up_with_what_comes_late(tmp_path: Path) -> None:
    index = TrajectoryBuffer(tmp_path, tmp_path, (), skip_damaged=False)
    index.waiting = [row(0, 2, group="a", size=2), row(1, 2, group="b", size=2), row(2, 2, group="b", size=2)]
    index.discard_incomplete_groups(), index.discard_incomplete_groups()
    assert numbers(index.waiting) == [1, 2] and index.expired == 1
    index.waiting.append(row(3, 2, group="a", size=2))
    assert numbers(index.take(2, 2, 1, whole_groups=True, drop=False)) == [1, 2]
    assert index.waiting == [] and index.expired == 2


def test_an_episode_that_left_nothing_makes_room() -> None:
    feed = Feed(room=1)
    assert feed.drain() == ["0-0"]
    feed.loop.run_until_complete(feed.feed.give_back())
    assert feed.drain() == ["0-1"]


def test_without_a_sampled_token_nothing_is_too_old() -> None:
    assert pick([row(0, np.iinfo(np.int32).max, newest=-1)], 1) == ([0], [])


class Blocks:
    """A task whose blocks hold groups of `size`, members apart from each other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def training_specs(self, block: int, count: int) -> list[EpisodeSpec]:
        groups = -(-count // self.size)
        return [EpisodeSpec(f"{block}-{i}", f"p{i % groups}", f"g{i % groups}") for i in range(count)]


class Feed:
    """A feed with an event loop of its own."""

    def __init__(self, size: int = 1, recorded: tuple[str, ...] = (), limit: int | None = None, room: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.feed = EpisodeScheduler([Blocks(size)], lambda block: 0, 4, set(recorded), limit)
        self.allow(room)

    def allow(self, room: int) -> None:
        self.loop.run_until_complete(self.feed.allow(room))

    def take(self) -> ScheduledEpisode | None:
        return self.loop.run_until_complete(self.feed.take())

    def drain(self) -> list[str]:
        """All that there is room for."""
        names = []
        while not self.feed.starved and (planned := self.take()) is not None:
            names.append(planned.spec.trajectory_id)
        return names


def test_no_more_than_there_is_room_for() -> None:
    feed = Feed(room=6)
    assert feed.drain() == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1"]
    waiting = feed.loop.create_task(feed.feed.take())
    feed.allow(6)
    assert not waiting.done()
    feed.allow(7)
    assert feed.loop.run_until_complete(waiting).spec.trajectory_id == "1-2"


def test_recorded_episodes_are_not_played_again_and_count() -> None:
    assert Feed(recorded=("0-0", "0-2", "1-0"), room=6).drain() == ["0-1", "0-3", "1-1"]


def test_a_group_that_was_begun_is_begun_whole() -> None:
    feed = Feed(size=2, room=3)
    assert feed.drain() == ["0-0", "0-2", "0-1", "0-3"]
    assert feed.feed.begun == 4


def test_a_limit_ends_the_feed() -> None:
    assert Feed(limit=3, room=100).drain() == ["0-0", "0-1", "0-2"]


@given(
    st.integers(0, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.sampled_from([0, 0.3]), st.integers(0, 9999)
)
def test_staleness_is_bounded_nothing_is_used_twice_and_nothing_locks_up(
    staleness: int, group: int, whole: bool, drop: bool, failing: float, seed: int
) -> None:
    """Trainer and rollout process in small steps, at random; episodes differ much in length, some leave
    nothing."""
    rng = random.Random(seed)
    count, version, taken = 4, 0, 0
    used: set[int] = set()
    index = TrajectoryBuffer(Path(), Path(), (), skip_damaged=False)
    flying: deque[tuple[int, Row]] = deque()
    feed = Feed(size=group)
    for step in range(4000):
        if version == 12:
            break
        feed.allow(taken + index.expired + (staleness + 1) * count)
        if not feed.feed.starved and rng.random() < 0.7:
            planned = feed.take()
            name = f"{planned.block}/{planned.spec.group_id}"
            ends = step + (rng.randrange(60) if rng.random() < 0.1 else rng.randrange(4))
            flying.append((ends, row(step, version, group=name, size=planned.group_size)))
        for ends, begun in list(flying):
            if ends <= step:
                flying.remove((ends, begun))
                if rng.random() < failing:
                    feed.loop.run_until_complete(feed.feed.give_back())
                else:
                    index.waiting.append(row(begun.row, begun.oldest, version, begun.group, begun.size))
        chosen = index.take(count, version, staleness, whole_groups=whole, drop=drop)
        if not chosen and whole and feed.feed.starved and not flying:
            index.discard_incomplete_groups()
        if chosen:
            assert not drop or all(version - staleness <= found.oldest <= version for found in chosen)
            assert not used & {found.row for found in chosen}
            used |= {found.row for found in chosen}
            taken, version = taken + len(chosen), version + 1
    feed.loop.close()
    assert version == 12


def trajectory(name: str, versions: tuple[int, ...] = (0, 0), **metadata) -> Trajectory:
    n = len(versions) + 1
    return Trajectory(
        trajectory_id=name,
        prompt_id="p",
        group_id="g",
        tokens=np.arange(n, dtype=np.int32),
        action_mask=np.arange(n) > 0,
        turn_id=np.where(np.arange(n) > 0, 0, -1).astype(np.int16),
        logprobs=np.zeros(n, np.float32),
        version=np.array((99, *versions), np.int32),
        turn_rewards=np.zeros(1, np.float32),
        reward=0.0,
        outcome="completed",
        terminated=True,
        truncated=False,
        metadata=metadata,
    )


def test_the_index_finds_new_shards_once_and_leaves_out_what_was_taken(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    write_shard(stream / "00000", HEADER, [trajectory("a"), trajectory("b", (1, 3), block=7, group_size=2)], name="0")
    index = TrajectoryBuffer(tmp_path, stream, {("stream/00000/0.arrow", 0)}, skip_damaged=False)
    index.scan()
    assert index.waiting == [Row("stream/00000/0.arrow", 1, "7/g", 2, 1, 3)]
    write_shard(stream / "00001", HEADER, [trajectory("c")], name="1")
    index.scan(), index.scan()
    assert [found.file for found in index.waiting] == ["stream/00000/0.arrow", "stream/00001/1.arrow"]
    taken = index.take(1, 3, 9, whole_groups=True, drop=True)
    assert [found.file for found in taken] == ["stream/00001/1.arrow"] and len(index.waiting) == 1


def test_a_damaged_shard_is_an_error_or_left_out(tmp_path: Path) -> None:
    write_shard(tmp_path / "s" / "0", HEADER, [trajectory("a")], name="0")
    path = tmp_path / "s" / "0" / "0.arrow"
    path.write_bytes(path.read_bytes()[:-200] + b"x" * 200)
    with pytest.raises(RolloutError, match="0.arrow"):
        TrajectoryBuffer(tmp_path, tmp_path / "s", (), skip_damaged=False).scan()
    index = TrajectoryBuffer(tmp_path, tmp_path / "s", (), skip_damaged=True)
    index.scan()
    assert index.waiting == [] and (index.found, index.expired) == (1, 1)


def make_writer(stream: Path, **changes) -> ShardWriter:
    settings = {"episodes": 2, "seconds": 60.0, "patience": 60.0} | changes
    return ShardWriter(stream, HEADER, **settings)


def test_shards_are_small_and_a_restarted_writer_goes_on(tmp_path: Path) -> None:
    async def write(names: str) -> None:
        writer = make_writer(tmp_path)
        for name in names:
            await writer.add(trajectory(name))
        await writer.flush()
        assert writer.written == len(names) // 2 * 2
        await writer.flush(force=True)

    asyncio.run(write("abc"))
    asyncio.run(write("de"))
    assert [path.name for path in sorted((tmp_path / "00000").glob("*.arrow"))] == [
        "00000000.arrow",
        "00000001.arrow",
        "00000002.arrow",
    ]
    assert recorded_ids(tmp_path) == set("abcde")


def test_an_episode_without_tokens_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def write() -> ShardWriter:
        writer = make_writer(tmp_path)
        for name, versions in (("a", (0, 0)), ("empty", None), ("b", (0, 0))):
            await writer.add(nothing(name) if versions is None else trajectory(name, versions))
        return writer

    writer = asyncio.run(write())
    assert writer.written == 2 and writer.buffered == 0
    assert read_batch(tmp_path / "00000").trajectory_ids == ("a", "b")
    assert "episode empty left nothing to record: no container left" in caplog.text


def nothing(name: str) -> Trajectory:
    """What is left of an episode whose environment did not start."""
    whole = trajectory(name, error="no container left")
    per_token = ("tokens", "action_mask", "turn_id", "logprobs", "version")
    return dataclasses.replace(
        whole, outcome="aborted", **{field: getattr(whole, field)[:0] for field in per_token}, turn_rewards=np.zeros(0)
    )


def test_a_full_disk_is_waited_for_and_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout_worker.shard_writer.RETRY_SECONDS", 0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def write() -> ShardWriter:
        writer = make_writer(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            await writer.add(trajectory("a"))
            adding = asyncio.create_task(writer.add(trajectory("b")))
            another = asyncio.create_task(writer.add(trajectory("c")))
            while not writer.problem:
                await asyncio.sleep(0.01)
            assert "could not be written" in writer.problem and list(tmp_path.rglob("*.arrow*")) == []
            assert not adding.done() and not another.done(), "nothing piles up in memory meanwhile"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await asyncio.gather(adding, another)
        return writer

    writer = asyncio.run(write())
    assert writer.problem == "" and writer.written == 2
    assert read_batch(tmp_path / "00000").trajectory_ids == ("a", "b")


def test_a_disk_that_stays_full_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout_worker.shard_writer.RETRY_SECONDS", 0.01)
    (tmp_path / "00000").write_text("a file where the folder should be")

    async def write() -> None:
        await make_writer(tmp_path, episodes=1, patience=0.1).add(trajectory("a"))

    with pytest.raises(RolloutError, match="could not be written"):
        asyncio.run(write())


def test_a_record_that_does_not_fit_its_schema_is_not_tried_again(tmp_path: Path) -> None:
    bad = trajectory("a")
    object.__setattr__(bad, "logprobs", bad.logprobs.astype(np.float64))
    with pytest.raises(RolloutError, match="wrong array type"):
        asyncio.run(make_writer(tmp_path, episodes=1).add(bad))
