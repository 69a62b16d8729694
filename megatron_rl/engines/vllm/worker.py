"""What runs inside every vLLM worker: weights from a published directory, and proof that they arrived.

Invariants:

* An update replaces every parameter or raises; one that raises leaves layers of two versions, but none half loaded, so
  that the next whole update repairs it.
* Asleep, no parameter, key or value is read; awake again, none means anything before the next whole update.
* Of several engine copies behind one address (`VllmOptions.data_parallel`) vLLM hands back what the first one returned,
  but everyone's errors: what the others have to say, they raise.
* vLLM refers to this module by name (`WORKER_EXTENSION`, `TRANSFER_BACKEND` in `options`); importing it registers the
  transfer engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform

from megatron_rl.engines.vllm.host_memory import ReleasableMemory, resident_bytes
from megatron_rl.engines.vllm.options import TRANSFER_BACKEND
from megatron_rl.errors import CheckpointError, EngineError, EngineVersionError
from megatron_rl.hf.reader import SafetensorsReader


@dataclass
class DirectoryInit(WeightTransferInitInfo):
    """Nothing is set up: the directory is named by each update."""


@dataclass
class DirectoryUpdate(WeightTransferUpdateInfo):
    """One whole set of weights."""

    path: str
    """HF checkpoint directory, on a disk or in shared memory of this host."""


class DirectoryTransfer(WeightTransferEngine[DirectoryInit, DirectoryUpdate]):
    """Loads an HF checkpoint directory into the live model; each worker maps the files and reads what it needs."""

    init_info_cls = DirectoryInit
    update_info_cls = DirectoryUpdate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The checkpoint the model came from says what a whole set of weights is.
        self._wanted = _shapes(self.model_config.model)
        self.reload_seconds = 0.0
        """What vLLM itself needed for the last update."""

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Let layers wait for their new weights."""
        self._kernels = _take_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        """Load all tensors of the directory.

        Raises:
            CheckpointError: unreadable, or not the tensors of the checkpoint that the model came from.
        """
        try:
            self._check(update_info.path)
            tensors, start = list(_tensors(update_info.path)), time.perf_counter()
            self.model.load_weights(iter(tensors))
            self.reload_seconds = time.perf_counter() - start
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """End an unfinished update: layers that still wait get their old tensors and kernels back, with nothing
        buffered. Complete ones keep the new weights, so only another whole update makes the model one version again."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    def _check(self, path: str) -> None:
        found = _shapes(path)
        if wrong := sorted(set(found.items()) ^ set(self._wanted.items())):
            name = wrong[0][0]
            raise CheckpointError(
                "the directory does not hold the tensors of the model", file=path, field=name,
                found=found.get(name), expected=self._wanted.get(name),
            )  # fmt: skip

    def finish_weight_update(self) -> None:
        """Put the last layers in place."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


class WorkerExtension:
    """Methods that vLLM adds to its workers, called through `collective_rpc`.

    A sleeping engine was told so by vLLM's own call, which keeps its scheduler from running; on a GPU that call also
    gives the memory back. vLLM's workers for a CPU ignore it: there `leave_device` and `return_to_device` do it.
    """

    _lent: ReleasableMemory | None = None

    def device_state(self) -> dict[str, Any]:
        """`held_bytes` (see `replica.Footprint`), and whether memory `can_leave`."""
        if current_platform.is_cpu():
            return {"held_bytes": resident_bytes(), "can_leave": True}
        free, total = torch.accelerator.get_memory_info()
        return {"held_bytes": total - free, "can_leave": self.vllm_config.model_config.enable_sleep_mode}

    def leave_device(self) -> None:
        """After vLLM's own sleep. On a CPU: weights, what kernels packed of them, keys and values are given back."""
        if not current_platform.is_cpu() or self._lent:
            return
        model, self._lent = self.model_runner.get_model(), ReleasableMemory()
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                # Holds a packed copy of the weight; a reload makes a new one.
                layer.cpu_linear = _asleep
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), Tensor)]
        self._lent.release([*model.parameters(), *caches])

    def return_to_device(self) -> None:
        """Before vLLM's own waking. On a CPU: memory is there again, and zero."""
        if self._lent:
            self._lent.restore()

    def load_directory(self, path: str) -> float:
        """A whole update in one call, which may be repeated: nothing stays begun if the caller goes away.

        Returns:
            Seconds that vLLM's own reload took, from tensors in mapped files to layers in place.

        Raises:
            CheckpointError: see `DirectoryTransfer.receive_weights`.
            EngineError: asleep.
        """
        self._require_memory()
        if self._weight_update_active:
            # An update that broke off where vLLM does not clean up would keep every later one from starting.
            self.weight_transfer_engine.abandon()
            self._weight_update_active = False
        self.start_weight_update()
        self.update_weights({"path": path})
        self.finish_weight_update()
        return self.weight_transfer_engine.reload_seconds

    def differing_parameters(self, path: str) -> dict[str, list[str]]:
        """Compare live parameters that keep their name and shape (norms, routers, unsharded embeddings) with files.

        Every optimizer step moves a norm, so these tell one version from the next. Others are fused, sharded or packed.

        Returns:
            `compared` and `different` names. Bits are compared, in the model's dtype.

        Raises:
            EngineError: asleep.
            EngineVersionError: parameters of another engine copy than the first differ.
        """
        self._require_memory()
        files, compared, different = SafetensorsReader(path), [], []
        for name, live in self.model_runner.get_model().named_parameters():
            if name in files and files.shape(name) == tuple(live.shape):
                compared.append(name)
                stored = files.read(name, check_finite=False).to(live.device, live.dtype)
                if not torch.equal(stored, live):
                    different.append(name)
        if different and self._copy:
            raise EngineVersionError(
                f"engine copy {self._copy} holds other weights than were published",
                file=path, field=different[0], found=f"{len(different)} parameters differ", expected="none",
            )  # fmt: skip
        return {"compared": compared, "different": different}

    def reseed(self, seed: str) -> None:
        """Restart the sampling stream, one for each engine copy; a string, because that is what HTTP hands over."""
        torch.manual_seed(int(seed) + self._copy)

    @property
    def _copy(self) -> int:
        """Number of this engine copy behind its server's address."""
        return self.vllm_config.parallel_config.data_parallel_index

    def _require_memory(self) -> None:
        if self._lent:
            raise EngineError(
                "a sleeping engine holds no weights", found="asleep", expected="awake: `wake` comes first"
            )


def _asleep(*_: Any) -> Tensor:
    raise RuntimeError("a layer of a sleeping engine, or one that its reload forgot, is used")


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    files = SafetensorsReader(path)
    return {name: files.shape(name) for name in files.names()}


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    files = SafetensorsReader(path)
    for name in files.names():
        yield name, files.read(name, check_finite=False)


def _take_moe_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Take the kernels of expert layers away, so that a reload builds new ones; returns (method, kernel) pairs.

    vLLM packs expert weights for its CPU kernel only where it builds the kernel (seen in 0.30 to 0.32): a reload that
    finds one leaves them unpacked, and log-probs are off by 3 while every call says success.
    """
    if not current_platform.is_cpu():
        return []
    methods = [layer.quant_method for layer in model.modules() if isinstance(layer, RoutedExperts)]
    taken = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in taken:
        method.moe_kernel = None
    return taken


if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
    # vLLM's bfloat16 attention uses tile registers without asking Linux for them first (0.30): an illegal instruction,
    # unless some matrix product has asked before.
    torch.cpu._init_amx()

if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, DirectoryTransfer)
