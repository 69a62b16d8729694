"""The interface of one vLLM, whether it runs in this process or behind a server's address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_rl.engines.vllm.completion import Completion, CompletionRequest


@dataclass(frozen=True)
class Description:
    """What a vLLM reports about itself."""

    version: str
    """Of vLLM."""
    max_model_len: int
    """Most tokens of a sequence."""
    can_sleep: bool
    """Whether `Replica.sleep` releases memory: on a GPU only where vLLM was started with its sleep mode."""


@dataclass(frozen=True)
class Footprint:
    """Memory before and after going to sleep, in bytes, of the worker that uses most.

    On a GPU: in use on the device, by any process, as the driver counts: what is free afterwards is free for others.
    On a CPU: resident, of the worker's process.

    Example:
        `Footprint(awake=1_194_000_000, asleep=609_000_000)`
    """

    awake: int
    asleep: int


class Replica(Protocol):
    """One vLLM.

    All methods raise `EngineUnavailableError` where it does not answer, `EngineError` where it refuses.
    """

    name: str
    """Its address or the like, for errors."""

    async def complete(self, request: CompletionRequest, temperature: float) -> Completion:
        """Sample one continuation, with top-p 1 and no top-k. Cancelling the call ends its work in the vLLM."""
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """[N] log-probs of a prompt's tokens at temperature 1, 0 at the first."""
        ...

    async def describe(self) -> Description:
        """Its version and abilities."""
        ...

    async def tag(self) -> str:
        """The name of its weights, as last given to `load` or `set_tag`; a restart resets it."""
        ...

    async def set_tag(self, tag: str) -> None:
        """Name the weights it holds."""
        ...

    async def pause(self) -> None:
        """End running calls early (their completions have the reason `ABORTED`) and hold back new ones."""
        ...

    async def resume(self) -> None:
        """Accept calls again."""
        ...

    async def load(self, directory: Path, tag: str) -> None:
        """Replace the weights and drop every stored prefix. Only while paused and awake."""
        ...

    async def differing(self, directory: Path) -> list[str]:
        """Names of comparable parameters whose bits are not those of the directory. Only while awake.

        Raises:
            EngineVersionError: nothing can be compared.
        """
        ...

    async def sleep(self) -> Footprint:
        """Release the memory of weights, keys and values, whose contents are lost. Only while paused."""
        ...

    async def wake(self) -> None:
        """Allocate that memory again, still paused; its contents are undefined until `load`. No effect while awake."""
        ...

    async def is_sleeping(self) -> bool:
        """Whether it may lack its memory. A server that was restarted does not sleep."""
        ...

    async def reseed(self, seed: int) -> None:
        """Restart the sampling stream."""
        ...

    async def close(self) -> None:
        """Release what is held on this side; a server keeps running."""
        ...
