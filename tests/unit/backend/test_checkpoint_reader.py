"""Metadata of a checkpoint is a pickle: what is not metadata in it is refused before it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.backend.checkpoint_reader import METADATA, StoredTensors, read_metadata
from megatron_rl.errors import CheckpointError


class Planted:
    """Calls a function while it is unpickled."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def written(folder: Path, value: object) -> Path:
    (folder / METADATA).write_bytes(pickle.dumps(value))
    return folder


@pytest.mark.parametrize("inside", [False, True])
def test_planted_code_does_not_run(tmp_path: Path, inside: bool) -> None:
    planted = Planted(os.mkdir, str(tmp_path / "ran"))
    folder = written(tmp_path, Metadata({"a": planted}) if inside else planted)
    for read in (read_metadata, StoredTensors):
        with pytest.raises(CheckpointError, match="mkdir is no part"):
            read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value", [torch.load, Planted(eval, "1"), {"a": 1}, [Metadata({})], Planted(pickle.loads, b"")]
)
def test_what_is_no_metadata_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="no distributed checkpoint"):
        read_metadata(written(tmp_path, value))


def test_a_torn_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    whole = pickle.dumps(Metadata({}))
    for length in range(0, len(whole), 7):
        (tmp_path / METADATA).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="no distributed checkpoint"):
            read_metadata(tmp_path)


def test_metadata_itself_is_read(tmp_path: Path) -> None:
    assert read_metadata(written(tmp_path, Metadata({}))) == Metadata({})
