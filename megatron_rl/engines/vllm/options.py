"""How a vLLM is started: one description for an engine in this process and for servers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WORKER_EXTENSION = "megatron_rl.engines.vllm.worker.WorkerExtension"
TRANSFER_BACKEND = "directory"
SLEEP_LEVEL = 2
"""vLLM's sleep level that drops the weights. Level 1 would keep them in the host's memory, which the trainer needs for
its offloaded states, and rarely use them again: waking loads a new version, and the old one is still published."""


def vllm_environment() -> dict[str, str]:
    """Environment variables of every vLLM process."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Enables the HTTP routes that pause a server, change its weights and send it to sleep.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if not torch.cuda.is_available():
        # Compiling one small function of the sampler for a CPU would delay the first call by half a minute.
        variables["TORCH_COMPILE_DISABLE"] = "1"
        # A reload assembles each layer in newly allocated memory. Page faults are a quarter of its time, less with
        # large pages. Read by a process when it starts.
        variables["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return variables


@dataclass(frozen=True)
class VllmOptions:
    """What to load and how much memory to use. Sampling is set by `engine.VllmEngine`.

    Example:
        `VllmOptions("models/qwen3-30b-a3b", tensor_parallel=4, extra={"gpu_memory_utilization": 0.8})`
    """

    model: str | Path
    """HF checkpoint directory to start with."""
    dtype: str = "bfloat16"
    """Of weights, keys and values."""
    max_model_len: int | None = None
    """Most tokens of a sequence; None: the model's own limit."""
    max_num_seqs: int = 256
    """Sequences that one replica decodes at a time."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values of one worker, in bytes; None: vLLM's share of the GPU."""
    tensor_parallel: int = 1
    """GPUs of one engine copy."""
    data_parallel: int = 1
    """Engine copies behind one server's address (GPUs)."""
    eager: bool | None = None
    """No CUDA graphs and no compilation; None: true where there is no GPU."""
    routes: bool = True
    """Return the experts used; False for dense models only."""
    can_sleep: bool = False
    """Start with vLLM's sleep mode, to release the GPU (`rollout.colocated`); on a CPU sleeping is always possible."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's engine arguments by their Python names; they override the above."""

    def arguments(self) -> dict[str, Any]:
        """Names and values of vLLM's engine arguments."""
        eager = not torch.cuda.is_available() if self.eager is None else self.eager
        chosen = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": eager,
            "enable_return_routed_experts": self.routes,
            # Log-probs of the distribution that was sampled from, not of raw logits.
            "logprobs_mode": "processed_logprobs",
            # A checkpoint's generation_config.json would bring its own top-p and top-k.
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "worker_extension_cls": WORKER_EXTENSION,
            "weight_transfer_config": {"backend": TRANSFER_BACKEND},
            "disable_log_stats": True,
        }
        if self.data_parallel > 1:
            chosen["data_parallel_size"] = self.data_parallel
        if self.can_sleep and torch.cuda.is_available():
            chosen["enable_sleep_mode"] = True
        return {name: value for name, value in (chosen | dict(self.extra)).items() if value is not None}

    def command_line(self) -> list[str]:
        """The same as command-line options of vLLM's server."""
        return _words(self.arguments())

    def changes(self) -> list[str]:
        """As `command_line`, but only what differs from the defaults, for a server command that sets those itself."""
        plain = VllmOptions(self.model).arguments()
        chosen = self.arguments()
        return _words({name: value for name, value in chosen.items() if name not in plain or plain[name] != value})


def _words(arguments: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        else:
            words += [option, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
