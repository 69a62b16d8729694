"""Weights from a live trainer to vLLM workers over NCCL, without a file in between. For GPUs of both sides.

vLLM's own "nccl" transfer backend does the work: rank 0 of the trainer joins a group with all workers and broadcasts
packed tensors; other trainer ranks only take part in the export. Servers are started with
``VllmOptions(extra={"weight_transfer_config": {"backend": "nccl"}})`` and paused by the caller
(`replica_state.ReplicaState.drain`).

This path cannot run on a CPU; tests/vllm/test_nccl.py covers it where there are two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import EngineError

Export = Callable[[], Iterator[tuple[str, Tensor]]]
"""Starts a collective export: (HF name, whole tensor), in the same order each time (`backend.weights.export_hf`)."""


class NcclSender:
    """One per trainer rank; every method is collective over the trainer.

    Args:
        servers: URLs, the same on all ranks.
        export: see `Export`.
        address, port: of rank 0, reachable from the servers.
        timeout: seconds that one HTTP request may take.

    Raises:
        EngineError: a server refuses.
    """

    def __init__(
        self, servers: Sequence[str], export: Export, *, address: str, port: int, timeout: float = 600.0
    ) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._servers = _Servers(servers, timeout)
        rank = dist.get_rank()
        workers = self._servers.count_workers() if rank == 0 else 0
        info = NCCLTrainerInitInfo(rank=rank, master_address=address, master_port=port, world_size=workers + 1)
        source = _source(export)
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self._servers, source=source)

    def send(self, tag: str) -> None:
        """Send the live weights to all workers and name them `tag`.

        The servers must be paused. Verify the result before they serve (`check_canary`): the transfer does not compare
        what was sent with what arrived.
        """
        self._servers.tag = tag
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class _Servers:
    """The control calls that vLLM's trainer side makes, sent to all servers at the same time."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self._urls, self._timeout, self.tag = list(urls), timeout, ""

    def count_workers(self) -> int:
        return sum(self._workers())

    def _workers(self) -> list[int]:
        found = [httpx2.get(f"{url}/get_world_size", timeout=self._timeout).json() for url in self._urls]
        return [one["world_size"] for one in found]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offset, bodies = 1, []
        for workers in self._workers():
            bodies.append({"init_info": init_info | {"rank_offset": offset}})
            offset += workers
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", [{"update_info": update_info}] * len(self._urls))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", [{"weight_version": weight_version or self.tag}] * len(self._urls))
        self._post("/reset_prefix_cache")

    def _post(self, path: str, bodies: list[dict[str, Any]] | None = None) -> None:
        """Post to all servers at the same time, because their workers take part in one NCCL call."""
        bodies = bodies or [{}] * len(self._urls)
        with ThreadPoolExecutor(len(self._urls)) as threads:
            responses = list(threads.map(lambda url, body: self._one(url + path, body), self._urls, bodies))
        for url, response in zip(self._urls, responses, strict=True):
            if response.status_code >= 400:
                raise EngineError("a server refuses a weight transfer", file=url + path, found=response.text[:500])

    def _one(self, url: str, body: dict[str, Any]) -> httpx2.Response:
        return httpx2.post(url, json=body, timeout=self._timeout)


def _source(export: Export) -> Any:
    """vLLM's view of an export: names, dtypes and shapes in advance, then the tensors."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def __init__(self) -> None:
            self._metadata: list[ParamMeta] | None = None

        def metadata(self) -> list[ParamMeta]:
            # Collected once by a whole export, which is a collective: shapes never change.
            if self._metadata is None:
                self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in export()]
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in export():
                yield name, tensor.to(torch.cuda.current_device())

    return Source()
