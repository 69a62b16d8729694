"""What was trained on is remembered across crashes: nothing twice, nothing skipped, replayable from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.errors import CheckpointError, RolloutError
from megatron_rl.rollouts.store import read_batch, select_rows
from megatron_rl.run_dir.ledger import Entry, Ledger, read_entries, reread
from tests.unit.rollouts.records import HEADER, sound, write_shard


def entry(iteration: int, *pieces: tuple[str, tuple[int, ...]]) -> Entry:
    return Entry(iteration, iteration, pieces or ((f"rollouts/{iteration}.arrow", (0, 1)),))


def three_iterations(directory: Path) -> tuple[Ledger, dict]:
    """A run that has consumed three iterations and saved after the first."""
    ledger = Ledger(directory, writes=True)
    ledger.consume(entry(0))
    saved = ledger.state()
    ledger.consume(entry(1))
    ledger.consume(entry(2))
    return ledger, saved


def test_a_lost_iteration_is_planned_again_from_the_same_rows(tmp_path: Path) -> None:
    _, saved = three_iterations(tmp_path)
    resumed = Ledger(tmp_path, writes=True)
    resumed.restore(saved)
    assert resumed.planned(0) is None and resumed.planned(1) == entry(1) and resumed.planned(2) == entry(2)
    before = (tmp_path / "consumed.jsonl").read_bytes()
    resumed.consume(entry(1))
    assert resumed.planned(2) == entry(2)
    resumed.consume(entry(2))
    resumed.consume(entry(3))
    assert (tmp_path / "consumed.jsonl").read_bytes().startswith(before)
    assert [e.iteration for e in read_entries(tmp_path / "consumed.jsonl")] == [0, 1, 2, 3]


def test_another_history_replaces_the_plans(tmp_path: Path) -> None:
    _, saved = three_iterations(tmp_path)
    resumed = Ledger(tmp_path, writes=True)
    resumed.restore(saved)
    other = entry(1, ("rollouts/other.arrow", (5,)))
    resumed.consume(other)
    assert resumed.planned(2) is None
    assert read_entries(tmp_path / "consumed.jsonl") == [entry(0), other]


def test_a_trajectory_is_not_trained_on_twice(tmp_path: Path) -> None:
    ledger, _ = three_iterations(tmp_path)
    with pytest.raises(RolloutError, match="trained on before") as caught:
        ledger.consume(entry(3, ("rollouts/1.arrow", (1,))))
    assert caught.value.row == 1
    resumed = Ledger(tmp_path, writes=False)
    resumed.restore(ledger.state())
    with pytest.raises(RolloutError, match="trained on before"):
        resumed.consume(entry(3, ("rollouts/0.arrow", (0,))))


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    ledger, _ = three_iterations(tmp_path / "one")
    (tmp_path / "two").mkdir()
    other = Ledger(tmp_path / "two", writes=True)
    other.consume(entry(0, ("rollouts/9.arrow", (0,))))
    with pytest.raises(CheckpointError, match="consumed rollouts") as caught:
        Ledger(tmp_path / "two", writes=True).restore(ledger.state())
    assert "output" in caught.value.setting


def test_a_change_anywhere_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    ledger, _ = three_iterations(tmp_path)
    path = tmp_path / "consumed.jsonl"
    path.write_text(path.read_text().replace("rollouts/0.arrow", "rollouts/7.arrow"))
    with pytest.raises(CheckpointError, match="consumed rollouts"):
        Ledger(tmp_path, writes=True).restore(ledger.state())


def test_a_torn_last_line_is_no_entry_and_is_mended(tmp_path: Path) -> None:
    ledger, _ = three_iterations(tmp_path)
    path = tmp_path / "consumed.jsonl"
    with open(path, "a") as stream:
        stream.write('{"iteration": 3, "ver')
    assert len(read_entries(path)) == 3
    resumed = Ledger(tmp_path, writes=True)
    resumed.restore(ledger.state())
    resumed.consume(entry(3))
    assert [e.iteration for e in read_entries(path)] == [0, 1, 2, 3]


def test_a_fresh_run_in_a_used_directory_starts_a_new_file(tmp_path: Path) -> None:
    three_iterations(tmp_path)
    Ledger(tmp_path, writes=True).consume(entry(0))
    assert read_entries(tmp_path / "consumed.jsonl") == [entry(0)]


def test_only_one_rank_writes(tmp_path: Path) -> None:
    Ledger(tmp_path, writes=False).consume(entry(0))
    assert not (tmp_path / "consumed.jsonl").exists()


def test_a_batch_is_read_again_in_the_order_it_was_trained_on(tmp_path: Path) -> None:
    shards = tmp_path / "rollouts"
    shards.mkdir()
    for name, numbers in (("a", (0, 1)), ("b", (2, 3, 4))):
        write_shard(shards, HEADER, [sound(number) for number in numbers], name=name)
    batch = select_rows(read_batch(shards), [4, 0, 2])
    again = reread(Entry.of(0, 0, batch, tmp_path), tmp_path)
    assert again.trajectory_ids == batch.trajectory_ids == ("trajectory-4", "trajectory-0", "trajectory-2")
    assert (again.tokens == batch.tokens).all() and (again.offsets == batch.offsets).all()
    with pytest.raises(RolloutError, match="not in its shard"):
        reread(Entry(0, 0, (("rollouts/a.arrow", (7,)),)), tmp_path)
