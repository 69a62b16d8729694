"""Offsets of hand-made timelines for the tests of objectives."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def offsets_of(lengths: Iterable[int]) -> torch.Tensor:
    """int64 [B+1] from the decisions of each sequence."""
    return torch.tensor([0, *lengths]).cumsum(0)
