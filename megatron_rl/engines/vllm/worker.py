"""What runs inside every vLLM worker: loading weights from a published directory, comparing them, and sleep on a CPU.

Invariants:

* An update replaces every parameter or raises; one that raises leaves layers of two versions, but none half loaded, so
  that the next whole update repairs it.
* Asleep, no parameter, key or value is read; awake again, their contents are undefined before the next whole update.
* Of several engine copies behind one address (`VllmOptions.data_parallel`) vLLM returns the first one's result, but
  raises the errors of all: another copy therefore raises where the first would return a finding.
* vLLM refers to this module by name (`WORKER_EXTENSION`, `TRANSFER_BACKEND` in `options`); importing it registers the
  transfer engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
    """Empty: each update names its directory."""


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
        # The checkpoint that the model was started with defines what a whole set of weights is.
        self._expected = _shapes(self.model_config.model)
        self.reload_seconds = 0.0
        """Duration of vLLM's own reload in the last update."""

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        """No connection is needed."""

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights."""
        self._kernels = _take_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        """Load all tensors of the directory.

        Raises:
            CheckpointError: unreadable, or not the tensors of the checkpoint that the model was started with.
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
        """End an unfinished update: incomplete layers get their old tensors and kernels back, without buffers.

        Complete layers keep the new weights, so only another whole update gives the model one version again.
        """
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
        if wrong := sorted(set(found.items()) ^ set(self._expected.items())):
            name = wrong[0][0]
            raise CheckpointError(
                "the directory does not hold the tensors of the model", file=path, field=name,
                found=found.get(name), expected=self._expected.get(name),
            )  # fmt: skip

    def finish_weight_update(self) -> None:
        """Finish the last layers."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No resources are held."""


class WorkerExtension:
    """Methods that vLLM adds to its workers, called through `collective_rpc`.

    Sleep begins with vLLM's own call, which stops its scheduler and on a GPU also releases the memory. vLLM's workers
    for a CPU release nothing: there `release_memory` and `restore_memory` do it.
    """

    _released: ReleasableMemory | None = None

    # Of the vLLM worker that this class is mixed into. Without values: vLLM refuses an extension with attributes of its
    # worker.
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def device_state(self) -> dict[str, Any]:
        """`used_bytes` (int, see `replica.Footprint`) and `can_sleep` (bool: whether sleep releases memory)."""
        if current_platform.is_cpu():
            return {"used_bytes": resident_bytes(), "can_sleep": True}
        free, total = torch.accelerator.get_memory_info()
        return {"used_bytes": total - free, "can_sleep": self.vllm_config.model_config.enable_sleep_mode}

    def release_memory(self) -> None:
        """To be called after vLLM's own sleep. On a CPU: release weights, packed copies of them, keys and values."""
        if not current_platform.is_cpu() or self._released:
            return
        model, self._released = self.model_runner.get_model(), ReleasableMemory()
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                # Holds a packed copy of the weight; a reload makes a new one.
                layer.cpu_linear = _asleep
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), Tensor)]
        self._released.release([*model.parameters(), *caches])

    def restore_memory(self) -> None:
        """To be called before vLLM's own waking. On a CPU: allocate the memory again, filled with zeros."""
        if self._released:
            self._released.restore()

    def load_directory(self, path: str) -> float:
        """Run a whole update in one call, which may be repeated, also after one that was not finished.

        Args:
            path: HF checkpoint directory, on a disk or in shared memory of this host.

        Returns:
            Seconds that vLLM's own reload took, from tensors in mapped files to finished layers.

        Raises:
            CheckpointError: see `DirectoryTransfer.receive_weights`.
            EngineError: the engine sleeps.
        """
        self._require_memory()
        if self._weight_update_active:
            # vLLM does not clean up after every error, and starts no update while one is active.
            self.weight_transfer_engine.abandon()
            self._weight_update_active = False
        self.start_weight_update()
        self.update_weights({"path": path})
        self.finish_weight_update()
        return self.weight_transfer_engine.reload_seconds

    def differing_parameters(self, path: str) -> dict[str, list[str]]:
        """Compare live parameters that keep their name and shape (norms, routers, unsharded embeddings) with files.

        Every optimizer step changes a norm, so these distinguish one version from the next. Other parameters are fused,
        sharded or packed.

        Args:
            path: HF checkpoint directory.

        Returns:
            `compared` and `different`: names. Bits are compared, in the model's dtype.

        Raises:
            EngineError: the engine sleeps.
            EngineVersionError: parameters of another engine copy than the first differ.
        """
        self._require_memory()
        files = SafetensorsReader(path)
        compared: list[str] = []
        different: list[str] = []
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
        """Restart the sampling stream, which differs between engine copies.

        Args:
            seed: an integer below 2^63 as a string: HTTP calls pass strings.
        """
        torch.manual_seed(int(seed) + self._copy)

    @property
    def _copy(self) -> int:
        """Number of this engine copy behind its server's address."""
        return self.vllm_config.parallel_config.data_parallel_index

    def _require_memory(self) -> None:
        if self._released:
            raise EngineError("a sleeping engine holds no weights", found="asleep", expected="awake: call `wake` first")


def _asleep(*_: Any) -> Tensor:
    raise RuntimeError("a layer without weights was called: the engine sleeps, or its reload left the layer out")


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    files = SafetensorsReader(path)
    return {name: files.shape(name) for name in files.names()}


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    files = SafetensorsReader(path)
    for name in files.names():
        yield name, files.read(name, check_finite=False)


def _take_moe_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Remove the kernels of expert layers, so that a reload builds new ones; returns (method, kernel) pairs.

    vLLM packs expert weights for its CPU kernel only where it builds the kernel (seen in 0.30 to 0.32): a reload that
    finds one leaves the weights unpacked, and log-probs are wrong by 3 nats without any error.
    """
    if not current_platform.is_cpu():
        return []
    methods = [layer.quant_method for layer in model.modules() if isinstance(layer, RoutedExperts)]
    taken = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in taken:
        method.moe_kernel = None
    return taken


if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
    # vLLM's bfloat16 attention uses tile registers without requesting them from Linux first (0.30), which is an illegal
    # instruction unless some matrix product has requested them before.
    torch.cpu._init_amx()

if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, DirectoryTransfer)
