"""One vLLM as the pool sees it, whether it runs in this process or behind a server's address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_rl.engines.vllm.completion import Completion, CompletionRequest


@dataclass(frozen=True)
class Description:
    """What a vLLM says about itself."""

    version: str
    """Of vLLM."""
    max_model_len: int
    """Most tokens of a sequence."""
    can_sleep: bool
    """Whether `Replica.sleep` gives memory back: on a GPU only where vLLM was started with its sleep mode."""


@dataclass(frozen=True)
class Footprint:
    """Bytes before and after going to sleep, of the worker that holds most.

    On a GPU: in use on the device, by anybody, as the driver counts: what is free afterwards is free for others.
    On a CPU: resident, of the worker's process.
    """

    awake: int
    asleep: int


class Replica(Protocol):
    """All methods raise `EngineUnavailableError` where the vLLM does not answer, `EngineError` where it refuses."""

    name: str
    """Address or the like, for errors."""

    async def ask(self, question: CompletionRequest, temperature: float) -> Completion:
        """Sample one continuation, with top-p 1 and no top-k. Cancelling it ends the work for it."""
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """[N] log-probs of a prompt's tokens at temperature 1, 0 at the first."""
        ...

    async def describe(self) -> Description:
        """What it is."""
        ...

    async def tag(self) -> str:
        """The name of the weights it holds, as last given to `load` or `set_tag`; forgotten when it restarts."""
        ...

    async def set_tag(self, tag: str) -> None:
        """Name the weights it holds."""
        ...

    async def pause(self) -> None:
        """End running calls early (their answers say so) and hold back new ones."""
        ...

    async def resume(self) -> None:
        """Take calls again."""
        ...

    async def load(self, directory: Path, tag: str) -> None:
        """Replace the weights and forget every stored prefix. Only while paused and awake."""
        ...

    async def differing(self, directory: Path) -> list[str]:
        """Comparable parameters whose bits are not those of the directory. Only while awake.

        Raises:
            EngineVersionError: nothing can be compared.
        """
        ...

    async def sleep(self) -> Footprint:
        """Give back the memory of weights, keys and values, with what is in it. Only while paused."""
        ...

    async def wake(self) -> None:
        """Have the memory again, still paused; what is in it is undefined until `load`. Nothing where it is awake."""
        ...

    async def sleeps(self) -> bool:
        """Whether it may lack its memory. A server that was restarted does not sleep."""
        ...

    async def reseed(self, seed: int) -> None:
        """Restart the sampling stream."""
        ...

    async def close(self) -> None:
        """Let go of what is held here; a server goes on."""
        ...
