"""A vLLM server as a replica: completions with token ids in both directions, and control of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from megatron_rl.engines.vllm.completion import Completion, CompletionRequest, decode_array
from megatron_rl.engines.vllm.options import SLEEP_LEVEL
from megatron_rl.engines.vllm.replica import Description, Footprint
from megatron_rl.engines.vllm.server import SERVED_NAME
from megatron_rl.errors import EngineAnswerError, EngineError, EngineUnavailableError, EngineVersionError

_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "logprobs": 0,
    # Only the caller's stop tokens end a call.
    "ignore_eos": True,
    "detokenize": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


class HttpReplica:
    """Client of one server, which must run in development mode (`server.serve_command`): that enables weight updates.

    Args:
        url: ``http://host:port``.
        timeout: seconds that one sampling call may take.
        control_timeout: seconds that a query of its state may take.
        load_timeout: seconds that loading weights, going to sleep or waking may take.
    """

    def __init__(
        self, url: str, *, timeout: float = 600.0, control_timeout: float = 10.0, load_timeout: float = 600.0
    ) -> None:
        self.name = url
        self._timeout, self._control, self._load = timeout, control_timeout, load_timeout
        self._client = httpx2.AsyncClient(base_url=url, limits=httpx2.Limits(max_connections=None))
        self._instance: str | None = None

    async def complete(self, request: CompletionRequest, temperature: float) -> Completion:
        """See `Replica`.

        Raises:
            EngineVersionError: the server is another process than the one that was resumed last.
        """
        body = {
            "prompt": request.prompt,
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": request.stop_tokens,
            "temperature": 0.0 if request.greedy else temperature,
        }
        found, choice = await self._post_completion(body)
        self._check_instance(found)
        return Completion(
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            finish=choice["finish_reason"],
            routes=decode_array(choice.get("routed_experts")),
            prompt_routes=decode_array(choice.get("prompt_routed_experts") or found.get("prompt_routed_experts")),
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `Replica`."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        _, choice = await self._post_completion(body)
        return [
            0.0,
            *(
                entry[str(token)]["logprob"]
                for entry, token in zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)
            ),
        ]

    async def describe(self) -> Description:
        """See `Replica`."""
        version, models = await self._get("/version"), await self._get("/v1/models")
        states = await self._on_workers("device_state")
        can_sleep = all(state["can_sleep"] for state in states)
        return Description(version["version"], models["data"][0]["max_model_len"], can_sleep)

    async def tag(self) -> str:
        """See `Replica`."""
        return (await self._get("/weight_info"))["weight_version"]

    async def set_tag(self, tag: str) -> None:
        """See `Replica`."""
        await self._post("/update_weight_version", {"new_version": tag})

    async def pause(self) -> None:
        """See `Replica`."""
        await self._post("/pause", params={"mode": "abort"})

    async def resume(self) -> None:
        """See `Replica`. From here on completions must come from the server's current process."""
        await self._post("/resume")
        found, _ = await self._post_completion({"prompt": [0], "max_tokens": 1, "temperature": 1.0})
        self._instance = found.get("system_fingerprint")

    async def load(self, directory: Path, tag: str) -> None:
        """See `Replica`."""
        await self._on_workers("load_directory", path=str(directory))
        found = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not (found or {}).get("success"):
            raise EngineError("stored prefixes of old weights are still in use", file=self.name, found=found)
        await self.set_tag(tag)

    async def differing(self, directory: Path) -> list[str]:
        """See `Replica`."""
        return differences(await self._on_workers("differing_parameters", path=str(directory)), self.name)

    async def sleep(self) -> Footprint:
        """See `Replica`."""
        awake = used_bytes(await self._on_workers("device_state"))
        await self._post("/sleep", params={"level": str(SLEEP_LEVEL)}, timeout=self._load)
        await self._on_workers("release_memory")
        return Footprint(awake, used_bytes(await self._on_workers("device_state")))

    async def wake(self) -> None:
        """See `Replica`."""
        await self._on_workers("restore_memory")
        await self._post("/wake_up", timeout=self._load)
        # Waking ends the pause too, and there are no weights yet.
        await self.pause()

    async def is_sleeping(self) -> bool:
        """See `Replica`. True also for a server that is only paused, for instance by an update that broke off."""
        return (await self._get("/is_sleeping"))["is_sleeping"]

    async def reseed(self, seed: int) -> None:
        """See `Replica`."""
        await self._on_workers("reseed", seed=str(seed))

    async def close(self) -> None:
        """See `Replica`."""
        await self._client.aclose()

    async def _on_workers(self, method: str, **named: str) -> list[Any]:
        """What a method of `worker.WorkerExtension` returns on each worker."""
        call = {"method": method, "kwargs": named}
        return (await self._post("/collective_rpc", call, timeout=self._load))["results"]

    def _check_instance(self, found: Mapping[str, Any]) -> None:
        """`server` gives every process a fingerprint that comes with each response, so a restart shows at once."""
        instance = found.get("system_fingerprint")
        if instance != self._instance:
            raise EngineVersionError(
                "the server was restarted and holds the weights it began with",
                file=self.name, found=instance, expected=self._instance,
            )  # fmt: skip

    async def _post_completion(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The response and its one choice, which has the fields that are read."""
        found = await self._post("/v1/completions", {"model": SERVED_NAME} | _SAMPLING | body, timeout=self._timeout)
        try:
            (choice,) = found["choices"]
            if choice["prompt_token_ids"] != list(body["prompt"]):
                raise EngineAnswerError("a completion of another prompt", file=self.name, field="prompt_token_ids")
            choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]  # noqa: B018
        except (KeyError, TypeError, ValueError) as error:
            raise EngineAnswerError(
                "a completion lacks requested fields", file=self.name, found=repr(error), expected="ids and log-probs"
            ) from error
        return found, choice

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path, timeout=self._control)

    async def _post(
        self, path: str, body: Any = None, *, params: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        return await self._call("POST", path, json=body or {}, params=params, timeout=timeout or self._control)

    async def _call(self, method: str, path: str, **request: Any) -> Any:
        """The response's JSON.

        Raises:
            EngineUnavailableError: no connection, a lost one, no response in time, or a server error.
            EngineError: the server refuses the call.
            EngineAnswerError: the response is not JSON.
        """
        url = f"{self.name}{path}"
        try:
            response = await self._request(method, path, **request)
        except httpx2.TimeoutException as error:
            limit = f"a response within {request['timeout']:g} s"
            raise EngineUnavailableError("no answer in time", file=url, found=repr(error), expected=limit) from error
        except httpx2.TransportError as error:
            raise EngineUnavailableError("no connection, or a lost one", file=url, found=repr(error)) from error
        if response.status_code >= 400:
            kind = EngineUnavailableError if response.status_code >= 500 or response.status_code == 429 else EngineError
            raise kind("the server reports an error", file=url, found=f"{response.status_code} {response.text[:500]}")
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise EngineAnswerError("the response is not JSON", file=url, found=response.text[:200]) from error

    async def _request(self, method: str, path: str, **request: Any) -> httpx2.Response:
        """Send a request; repeat it once where the connection breaks.

        The server may close a kept connection at the moment it is used again. A repeated call is harmless: a completion
        of the first attempt is never read, and loading the same weights twice changes nothing.
        """
        try:
            return await self._client.request(method, path, **request)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            return await self._client.request(method, path, **request)


def used_bytes(workers: Sequence[Mapping[str, Any]]) -> int:
    """Memory of the worker that uses most, from each worker's `device_state`."""
    return max(worker["used_bytes"] for worker in workers)


def differences(workers: Sequence[Mapping[str, list[str]]], who: str) -> list[str]:
    """Sorted names of parameters that differ on any worker.

    Args:
        workers: each worker's `differing_parameters`.
        who: names the replica in errors.

    Raises:
        EngineVersionError: a worker has no parameter that can be compared.
    """
    if any(not worker["compared"] for worker in workers):
        raise EngineVersionError("no parameter can be compared with the published weights", file=who)
    return sorted({name for worker in workers for name in worker["different"]})
