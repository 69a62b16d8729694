"""Checks of a tensor's entries in one pass without temporaries: conversion reads every byte of a model through them."""

from __future__ import annotations

import torch
from torch import Tensor


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest entry, each NaN where any entry is NaN; zeros of a tensor without entries."""
    if not tensor.numel():
        nothing = tensor.new_zeros(())
        return nothing, nothing
    low, high = tensor.aminmax()
    return low, high


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. An infinity or a NaN anywhere shows in one of the extremes."""
    low, high = extremes(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def count_non_finite(tensor: Tensor) -> int:
    """How many entries are NaN or infinite. Slow: for the message of an error."""
    return int((~torch.isfinite(tensor)).sum())
