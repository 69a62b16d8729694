"""A proxy of a real vLLM server that spoils chosen responses, as networks and broken engines do."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

Spoil = Callable[[dict[str, Any]], None]
SAMPLING = "/v1/completions"


class FaultProxy:
    """Forwards everything; each fault of `faults` is used up by one sampling call, in order.

    A fault is a function that changes the response, or a word: `error` (500), `hang`, `drop` (half a response).
    """

    def __init__(self, upstream: str) -> None:
        self.upstream, self.faults = upstream, []
        self.sampled = 0
        """Sampling calls that came in, spoiled ones included."""
        self.released = threading.Event()
        """Ends hanging calls."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its own address."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def fault_for(self, path: str, body: bytes) -> Spoil | str | None:
        """The next fault, if this is a call that samples (proofs sample one token at most)."""
        if path != SAMPLING or json.loads(body).get("max_tokens", 0) <= 1:
            return None
        self.sampled += 1
        return self.faults.pop(0) if self.faults else None


def no_routes(response: dict[str, Any]) -> None:
    """The server was started without routes, or lost them."""
    response["choices"][0]["routed_experts"] = None


def too_few_rows(response: dict[str, Any]) -> None:
    """The last row is missing."""
    choice = response["choices"][0]
    choice["routed_experts"] = _encoded(_decoded(choice["routed_experts"])[:-1])


def missing_layer(response: dict[str, Any]) -> None:
    """One decoder layer is missing: neither all layers nor the MoE layers."""
    choice = response["choices"][0]
    choice["routed_experts"] = _encoded(np.concatenate([_decoded(choice["routed_experts"])] * 2, axis=1)[:, :5])


def nan_logprob(response: dict[str, Any]) -> None:
    """One log-prob is not a number."""
    response["choices"][0]["logprobs"]["token_logprobs"][-1] = float("nan")


def other_process(response: dict[str, Any]) -> None:
    """The response of a server that was restarted meanwhile."""
    response["system_fingerprint"] = "another"


def _decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def _encoded(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _forward(self, body: bytes) -> None:
            fault = proxy.fault_for(self.path, body)
            if fault == "error":
                self._reply(500, b'{"error": "spoiled"}')
                return
            if fault == "hang":
                proxy.released.wait(120)
                return
            status, content = self._send_upstream(body)
            if callable(fault):
                response = json.loads(content)
                fault(response)
                content = json.dumps(response).encode()
            self._reply(status, content, half=fault == "drop")

        def _send_upstream(self, body: bytes) -> tuple[int, bytes]:
            data = body if self.command == "POST" else None
            request = urllib.request.Request(
                proxy.upstream + self.path, data=data, headers={"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return reply.status, reply.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
            except OSError:
                time.sleep(0.05)
                return 502, b"{}"

        def _reply(self, status: int, content: bytes, *, half: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if half else content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
