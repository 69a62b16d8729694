"""States of every random generator of this rank, as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_rl.backend import platform


def random_states() -> dict[str, Any]:
    """Of Python's, numpy's, torch's (CPU and CUDA) and Megatron's tracked generators, made of what JSON keeps."""
    version, words, spare = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"] = {"key": numpy_state["state"]["key"].tolist(), "pos": int(numpy_state["state"]["pos"])}
    cuda = {"cuda": _hex(torch.cuda.get_rng_state())} if platform.on_gpu() else {}
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(words), spare],
        "numpy": numpy_state,
        "torch": _hex(torch.get_rng_state()),
        "megatron": {name: _hex(state) for name, state in tracked.items()},
        **cuda,
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Inverse of `random_states`."""
    version, words, spare = states["python"]
    random.setstate((version, tuple(words), spare))
    key = np.array(states["numpy"]["state"]["key"], np.uint32)
    np.random.set_state({**states["numpy"], "state": {**states["numpy"]["state"], "key": key}})
    torch.set_rng_state(_unhex(states["torch"]))
    if platform.on_gpu():
        torch.cuda.set_rng_state(_unhex(states["cuda"]))
    tracked = {name: _unhex(state) for name, state in states["megatron"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _unhex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
