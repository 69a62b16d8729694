"""The engine that a rollout process plays with, as `rollout.engine` names it.

Each start function imports its own libraries: the embedded engine runs where vLLM is not installed, and the reverse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_rl.config import RunConfig
from megatron_rl.engines import AsyncTokenEngine
from megatron_rl.errors import ConfigError
from megatron_rl.rollouts.schema import RolloutHeader
from megatron_rl.rollouts.store import shard_paths
from megatron_rl.run_dir.exchange import Exchange

if TYPE_CHECKING:
    from megatron_rl.engines.vllm.engine import VllmEngine
    from megatron_rl.engines.vllm.replica import Footprint
    from megatron_rl.engines.vllm.server import LocalServer


class RolloutEngine(AsyncTokenEngine, Protocol):
    """What the rollout process needs of an engine."""

    @property
    def version(self) -> int:
        """Weight version that samples new calls."""
        ...

    @property
    def context_limit(self) -> int:
        """Most tokens of a sequence."""
        ...

    def header(self, tokenizer_hash: str) -> RolloutHeader:
        """The header of rollouts recorded with it."""
        ...

    async def update(self, weights: Path, version: int) -> None:
        """Load other weights.

        Args:
            weights: HF directory.
            version: its version.

        Raises:
            EngineError, CheckpointError: they were refused; the old ones stay in use.
        """
        ...

    async def sleep(self) -> Footprint | None:
        """Release the device's memory until the next call or update.

        Returns:
            Memory before and after; None: not measured.

        Raises:
            EngineError: it still holds memory of the device.
        """
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


async def start_engine(config: RunConfig, weights: Path, version: int) -> RolloutEngine:
    """Start an engine with these weights, or connect to running servers and load them there.

    Args:
        config: the run.
        weights: published HF directory.
        version: its version.

    Raises:
        EngineError, LaunchError, ConfigError: it does not start, or the configuration does not fit.
    """
    start = {"embedded": _embedded, "vllm": _vllm, "vllm_http": _vllm_http}[config.rollout.engine]
    return await asyncio.to_thread(start, config, weights, version)


def _embedded(config: RunConfig, weights: Path, version: int) -> RolloutEngine:
    import torch

    from megatron_rl.engines.local import LocalEngine
    from megatron_rl.engines.local_async import LocalAsyncEngine

    torch.set_num_threads(1)
    engine = LocalEngine(
        weights,
        dtype=getattr(torch, _dtype(config)),
        temperature=config.rollout.temperature,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=_seed(config),
        version=version,
    )
    return LocalAsyncEngine(engine)


def _vllm(config: RunConfig, weights: Path, version: int) -> RolloutEngine:
    from megatron_rl.engines.vllm.inprocess_replica import InProcessReplica

    return _VllmRolloutEngine(_vllm_engine(config, [InProcessReplica(_options(config, weights))], weights, version))


def _vllm_http(config: RunConfig, weights: Path, version: int) -> RolloutEngine:
    from megatron_rl.engines.vllm.http_replica import HttpReplica
    from megatron_rl.engines.vllm.server import LocalServer

    addresses, server = list(config.rollout.servers), None
    if not addresses:
        log = Path(config.output) / "vllm.log"
        server = LocalServer(_options(config, weights), log=log, start_timeout=config.rollout.start_timeout)
        addresses = [server.__enter__().url]
    try:
        replicas = [HttpReplica(url) for url in addresses]
        return _VllmRolloutEngine(_vllm_engine(config, replicas, weights, version), server)
    except BaseException:
        if server is not None:
            server.stop()
        raise


def _options(config: RunConfig, weights: Path) -> Any:
    from megatron_rl.engines.vllm.options import VllmOptions

    # vLLM loads its first weights itself; the directory may be pruned later and is only read at the start.
    chosen = {"model": weights, "dtype": _dtype(config), "can_sleep": config.rollout.colocated}
    try:
        return VllmOptions(**{**chosen, **config.rollout.engine_options})
    except TypeError as error:
        raise ConfigError("vLLM does not take these options", found=error, setting="rollout.engine_options") from error


def _vllm_engine(config: RunConfig, replicas: Sequence[Any], weights: Path, version: int) -> VllmEngine:
    from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine

    engine = VllmEngine(
        replicas,
        weights,
        version=version,
        temperature=config.rollout.temperature,
        seed=_seed(config),
        settings=ReplicaSetSettings(start_timeout=config.rollout.start_timeout),
    )
    if config.rollout.colocated and not engine.can_sleep:
        engine.close()
        raise ConfigError(
            "a vLLM server cannot release its GPU", found="rollout.colocated", expected="one with --enable-sleep-mode",
            setting="rollout.colocated=false, or start rollout.servers with it",
        )  # fmt: skip
    return engine


def _dtype(config: RunConfig) -> str:
    return config.rollout.engine_dtype or config.model.dtype


def _seed(config: RunConfig) -> int:
    """A seed that differs after each restart, so that an episode that is played again samples other tokens."""
    shards = len(shard_paths(Exchange(Path(config.output)).stream, folders="*"))
    return int(np.random.SeedSequence([config.seed, shards]).generate_state(1)[0] >> 1)


class _VllmRolloutEngine:
    """A `RolloutEngine` over a `VllmEngine`, with the server that was started for it, if one was."""

    def __init__(self, engine: VllmEngine, server: LocalServer | None = None) -> None:
        self._engine, self._server = engine, server
        self.agenerate, self.header = engine.agenerate, engine.header

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def context_limit(self) -> int:
        return self._engine.max_model_len

    async def update(self, weights: Path, version: int) -> None:
        await asyncio.to_thread(self._engine.load, weights, version)

    async def sleep(self) -> Footprint:
        return await asyncio.to_thread(self._engine.sleep)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
