"""Makes Megatron-Core run on a CPU under gloo, and leaves it as it is on CUDA under NCCL.

Every patch of a dependency lives here. `install()` is idempotent; with CUDA it applies the two import-time fixes only.

The patches, each with its reason and when it can be removed:

* `torch.cuda.*` stubs: Megatron asks for the current device, streams and RNG state in many places. Until it has a
  device abstraction.
* `torch` as `megatron.core` sees it: `device="cuda"` literals in schedules and gradient clipping, pinned memory in
  rotary embeddings. Only the modules of Megatron see the proxy, and unlike a `TorchFunctionMode` it also reaches
  recompute on autograd's threads. Until the same.
* `Tensor.type()` as `megatron.core.optimizer` sees it: optimizers sort parameters by `torch.cuda.FloatTensor`. The
  same.
* `te_general_gemm`: 0.16.1 uses the name without defining it where Transformer Engine is absent. Until 0.17.
* `HAVE_TE` of latent attention: its module mistakes placeholders of Transformer Engine's classes for the real ones and
  calls `isinstance` with them. Until Megatron's placeholders are classes.
* `maybe_move_tensor_to_cpu`: split sizes stay tensors unless they were on CUDA, and gloo's all-to-all wants integers.
  Until Megatron has a CPU path.
* gloo's `scatter` reads non-contiguous inputs as if contiguous: silent corruption. Until fixed in torch.
* gloo's uneven `all_gather` and `reduce_scatter`: refused by gloo, needed for TP > 1 with EP and expert-TP > 1. Until
  gloo supports them.
* `Adam`: the distributed optimizer's `state_dict` reads one step per parameter group. Not used where Transformer Engine
  or Apex is present.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import sys
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "eye", "autocast")
_state = {"installed": False}

# Megatron and torch announce every optional library that is absent, in every rank, while they are imported.
for _category in (UserWarning, FutureWarning, DeprecationWarning):
    warnings.filterwarnings("ignore", module="megatron|torch", category=_category)


def on_gpu() -> bool:
    """Whether this process computes on CUDA."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device models and micro-batches live on."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else CPU


def device_of_new_parameters(config) -> torch.device:
    """Where a module of ours makes its parameters: the meta device for planning, else where Megatron makes them."""
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    return CPU if config.use_cpu_initialization else device()


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory, whether they name the current device or none (planning)."""
    cuda: Any = torch.cuda
    current = cuda.current_device
    cuda.current_device = lambda: torch.device("meta")
    try:
        with torch.device("meta"):
            yield
    finally:
        cuda.current_device = current


def collective_backend() -> str:
    """The torch.distributed backend of this machine: ``nccl`` on CUDA, else ``gloo``."""
    return "nccl" if on_gpu() else "gloo"


def have_transformer_engine() -> bool:
    """Whether Transformer Engine is importable; without it the local spec and our attention are used."""
    return on_gpu() and importlib.util.find_spec("transformer_engine") is not None


def dtype(name: str) -> torch.dtype:
    """torch's dtype of a configured precision."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@functools.cache
def peak_flops(precision: str, size: int = 1024) -> float:
    """Matrix-multiply FLOP/s of this rank's device, measured once: the denominator of utilisation."""
    where = device()
    left = torch.ones(size, size, dtype=dtype(precision), device=where)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(left, left).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def install() -> None:
    """Apply the patches this machine needs. Call before building any Megatron module."""
    if _state["installed"]:
        return
    if not on_gpu():
        _stub_cuda()
    _define_missing_gemm()
    _fix_latent_attention_flag()
    if not on_gpu():
        _import_megatron()
        _give_megatron_cpu_torch()
        _keep_split_sizes_on_cpu()
        _patch_gloo_collectives()
        _use_group_step_adam()
    _state["installed"] = True


class _Stream:
    """CUDA stream on a CPU, where everything runs in order anyway."""

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...
    def record_event(self, *args):
        return _Event()


class _Event:
    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...


def _stub_cuda() -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    stream = _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *a, **k: None
    cuda.synchronize = cuda.empty_cache = lambda *a, **k: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *a, **k: stream
    cuda.stream = lambda *a, **k: contextlib.nullcontext()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *a, **k: 0
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    tensor.cuda = lambda self, *a, **k: self
    module.cuda = lambda self, *a, **k: self
    _rename_tensor_types()


def _rename_tensor_types() -> None:
    tensor: Any = torch.Tensor
    plain = tensor.type

    def type_(self, *args, **kwargs):
        answer = plain(self, *args, **kwargs)
        if isinstance(answer, str) and sys._getframe(1).f_globals.get("__name__", "").startswith(
            "megatron.core.optimizer"
        ):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor.type = type_


def _define_missing_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _fix_latent_attention_flag() -> None:
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _import_megatron() -> None:
    """Import what we use, so that `_give_megatron_cpu_torch` finds every module that will run."""
    for name in (
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.distributed",
        "megatron.core.transformer.moe.token_dispatcher",
        "megatron.core.dist_checkpointing",
    ):
        importlib.import_module(name)
    package = importlib.import_module("megatron.core.dist_checkpointing.strategies")
    for module in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{package.__name__}.{module.name}")


class _CpuTorch(types.ModuleType):
    """`torch` as Megatron's modules see it: factories asked for CUDA make CPU tensors, all else passes through."""

    def __getattr__(self, name: str):
        return getattr(torch, name)


def _on_cpu(value):
    if isinstance(value, str) and value.startswith("cuda"):
        return CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


def _cpu_factory(factory):
    def make(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cpu_autocast(kind, *args, **kwargs):
    return torch.autocast("cpu" if kind == "cuda" else kind, *args, **kwargs)


def _give_megatron_cpu_torch() -> None:
    proxy = _CpuTorch("torch")
    for name in _FACTORIES:
        setattr(proxy, name, _cpu_autocast if name == "autocast" else _cpu_factory(getattr(torch, name)))
    modules: dict[str, Any] = dict(sys.modules)
    for name, module in modules.items():
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy
    from megatron.core.tensor_parallel import random as rng

    rng._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)


def _keep_split_sizes_on_cpu() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _patch_gloo_collectives() -> None:
    scatter, all_gather, reduce_scatter = dist.scatter, dist.all_gather, dist.reduce_scatter

    def contiguous_scatter(tensor, scatter_list=None, *args, **kwargs):
        return scatter(tensor, scatter_list and [t.contiguous() for t in scatter_list], *args, **kwargs)

    def uneven_all_gather(outputs, tensor, group=None, async_op=False):
        if len({o.shape for o in outputs}) == 1:
            return all_gather(outputs, tensor.contiguous(), group=group, async_op=async_op)
        longest = max(o.shape[0] for o in outputs)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in outputs]
        all_gather(gathered, padded, group=group)
        for out, got in zip(outputs, gathered, strict=True):
            out.copy_(got[: out.shape[0]])
        return None

    def uneven_reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({t.shape for t in inputs}) == 1:
            return reduce_scatter(output, [t.contiguous() for t in inputs], op=op, group=group, async_op=async_op)
        summed = torch.cat(list(inputs))
        dist.all_reduce(summed, op=op, group=group)
        output.copy_(summed.split([t.shape[0] for t in inputs])[dist.get_rank(group)])
        return None

    dist.scatter, dist.all_gather, dist.reduce_scatter = contiguous_scatter, uneven_all_gather, uneven_reduce_scatter


def _use_group_step_adam() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megatron_rl.backend.adam import GroupStepAdamW

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
