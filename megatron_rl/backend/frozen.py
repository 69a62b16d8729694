"""A step that leaves part of a model where it is.

Frozen parameters stay in the optimizer, so that layout, checkpoint and offload are the same with and without: their
gradients are zeroed before the norm is taken, which keeps their moments at zero and them out of the norm, and what
weight decay moved is put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.backend.anchor import copy_main_to_model
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.parameters import LocalParameter, local_parameters, main_copies

Frozen = Callable[[LocalParameter], bool]


def attention(local: LocalParameter) -> bool:
    """Projections of attention and their query and key norms; the norm before attention trains."""
    return local.canonical.startswith("self_attention.")


@torch.no_grad()
def step_without(optimizer: Optimizer, frozen: Frozen) -> tuple[bool, float]:
    """`Optimizer.step` for all but the frozen parameters. Collective."""
    held = [local.tensor for local in local_parameters(optimizer.model) if frozen(local)]
    for parameter in held:
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
    ids = {id(parameter) for parameter in held}
    mains = [main for part in optimizer.parts for main, parameter in main_copies(part) if id(parameter) in ids]
    before = [main.detach().clone() for main in mains] if optimizer.config.weight_decay else []
    stepped, norm = optimizer.step()
    if optimizer.config.weight_decay:
        # Collective, also on ranks that own none of them.
        for main, saved in zip(mains, before, strict=True):
            main.copy_(saved)
        copy_main_to_model(optimizer)
    return stepped, norm
