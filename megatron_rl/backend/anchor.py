"""Other weights in the live model: the EWMA anchor of PPO-EWMA (arXiv 2110.00641) and a frozen reference policy.

Both are stored like the float32 main weights, sharded with the distributed optimizer; no second model exists. Swapping
in is a copy and an all-gather, and swapping out restores the trained weights bit for bit:

* main weights that alias the model's memory (float32) are stashed first and copied back;
* main weights apart from it (bfloat16) are never written: the model's weights are copied from the anchor, and
  afterwards from the main weights again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.parameters import main_copies
from megatron_rl.objectives.ewma import ewma_update


def main_weights(optimizer: Optimizer) -> list[torch.Tensor]:
    """This rank's float32 main weights (flat pieces under the distributed optimizer), in a fixed order."""
    return [main for part in optimizer.parts for main, _ in main_copies(part)]


@contextlib.contextmanager
def swapped_in(optimizer: Optimizer, weights: list[torch.Tensor]) -> Iterator[None]:
    """Run with `weights` in place of the trained ones.

    Args:
        optimizer: the live model's.
        weights: one tensor per `main_weights` entry.
    """
    pairs = [pair for part in optimizer.parts for pair in main_copies(part)]
    aliased = mains_alias_model(optimizer)
    stash = [main.detach().clone() if alias else None for (main, _), alias in zip(pairs, aliased, strict=True)]
    with torch.no_grad():
        _compute_with(optimizer, [main for main, _ in pairs], aliased, weights)
    try:
        yield
    finally:
        with torch.no_grad():
            kept = [main if saved is None else saved for (main, _), saved in zip(pairs, stash, strict=True)]
            _compute_with(optimizer, [main for main, _ in pairs], aliased, kept)


def mains_alias_model(optimizer: Optimizer) -> list[bool]:
    """For each entry of `main_weights`: whether it shares memory with a model parameter (float32)."""
    chunks = optimizer.model.bare
    owned = {weight.untyped_storage().data_ptr() for chunk in chunks for weight in chunk.parameters()}
    return [main.untyped_storage().data_ptr() in owned for main in main_weights(optimizer)]


def _compute_with(
    optimizer: Optimizer, mains: list[torch.Tensor], aliased: list[bool], weights: list[torch.Tensor]
) -> None:
    """Make the model compute with `weights`, leaving separate main weights as they are."""
    originals = []
    for main, alias, weight in zip(mains, aliased, weights, strict=True):
        originals.append(main.data)
        if alias:
            main.data.copy_(weight)
        else:
            main.data = weight.detach()
    _copy_to_model(optimizer)
    for main, original in zip(mains, originals, strict=True):
        main.data = original
    _gather_model(optimizer)


def copy_main_to_model(optimizer: Optimizer) -> None:
    """Make the model compute with its main weights after they were written. Collective."""
    _copy_to_model(optimizer)
    _gather_model(optimizer)


def _copy_to_model(optimizer: Optimizer) -> None:
    """Copy main weights that are apart from the model's memory to this rank's part of it."""
    for part in optimizer.parts:
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()


def _gather_model(optimizer: Optimizer) -> None:
    if optimizer.model.topology.config.distributed_optimizer:
        for chunk in optimizer.model.chunks:
            chunk.start_param_sync(force_sync=True)


@dataclass
class Anchor:
    """EWMA of the main weights: Z₀ = 1, θ̄₀ = θ₀; after optimizer step n: Z ← βZ + 1, θ̄ ← (βZ_old θ̄ + θ)/Z."""

    optimizer: Optimizer
    decay: float
    z: float = 1.0
    average: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.average:
            self.restart()

    def restart(self) -> None:
        """θ̄ = θ, Z = 1."""
        self.z, self.average = 1.0, [main.detach().clone() for main in main_weights(self.optimizer)]

    def tick(self) -> None:
        """Once after every completed policy step, and at no other time."""
        self.z = ewma_update(self.z, self.decay, self.average, main_weights(self.optimizer))

    def swapped_in(self):
        """Context: the model computes with θ̄."""
        return swapped_in(self.optimizer, self.average)


@dataclass
class Reference:
    """π_ref as a frozen copy of the main weights, kept on the CPU between uses."""

    optimizer: Optimizer
    weights: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.weights:
            self.weights = [main.detach().to("cpu", copy=True) for main in main_weights(self.optimizer)]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context: the model computes with the reference weights."""
        mains = main_weights(self.optimizer)
        with swapped_in(self.optimizer, [w.to(m.device) for w, m in zip(self.weights, mains, strict=True)]):
            yield
