"""Phase offload: of two models on the same ranks, only the one being updated has gradients and optimizer states on
the device.

Model weights stay on the device, for scoring. Gradient buffers are freed and allocated again, not copied: between
updates they hold nothing. Moments, separate float32 main weights and the EWMA average move to the CPU. Main weights
that alias the model's memory (float32) stay.

Megatron's own `offload_to_cpu` would move those too and detach them from the model, so it is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_rl.backend import platform
from megatron_rl.backend.anchor import Anchor, main_weights, mains_alias_model
from megatron_rl.backend.optimizer import Optimizer

_CPU = torch.device("cpu")


def release(optimizer: Optimizer, anchor: Anchor | None = None) -> None:
    """Free a model's gradient buffers and move its optimizer states off the device. Nothing if that was done."""
    optimizer.megatron.zero_grad()
    for chunk in optimizer.model.chunks:
        chunk.offload_grad_buffers()
    _move(optimizer, anchor, _CPU)


def restore(optimizer: Optimizer, anchor: Anchor | None = None) -> None:
    """Undo `release`: gradient buffers are zero, states are as they were."""
    for chunk in optimizer.model.chunks:
        chunk.restore_grad_buffers()
    _move(optimizer, anchor, platform.device())


@contextlib.contextmanager
def on_device(optimizer: Optimizer, anchor: Anchor | None = None, *, enabled: bool) -> Iterator[None]:
    """Around one model's updates; with `enabled` False it stays as it is."""
    if not enabled:
        yield
        return
    restore(optimizer, anchor)
    try:
        yield
    finally:
        release(optimizer, anchor)


def held_bytes(optimizer: Optimizer) -> int:
    """Bytes of gradient buffers and of optimizer states on the device."""
    buffers = [b for chunk in optimizer.model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    where = platform.device().type
    return gradients + sum(t.nbytes for t in _states(optimizer) if t.device.type == where)


def _states(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for part in optimizer.parts:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _move(optimizer: Optimizer, anchor: Anchor | None, device: torch.device) -> None:
    for main, alias in zip(main_weights(optimizer), mains_alias_model(optimizer), strict=True):
        if not alias:
            main.data = main.data.to(device)
    for part in optimizer.parts:
        for state in part.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor)})
    if anchor is not None:
        anchor.average[:] = [weight.to(device) for weight in anchor.average]
    if platform.on_gpu() and device == _CPU:
        torch.cuda.empty_cache()
