"""Writing without waiting for the disk: durability is one test's subject and the others' cost."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_disk_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
