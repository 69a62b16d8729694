"""An embedded engine over `transformers` Qwen3-MoE: tokens in, tokens out, with the routes that were really used.

Invariants:

* A prompt's tokens, log-probs and routes do not depend, up to float rounding, on what shares its batch.
* Keys and values of a prefix are computed once for one weight version: an episode that continues its own tokens is
  not prefilled again (unless evicted), so one row of routes per token describes every log-prob of the episode exactly.
* `load` drops every stored prefix; a failed `load` leaves the old weights in place.
* A sampled token is a function of its distribution, the engine's seed, the prompt's stream and the token's position:
  which rank plays an episode, and beside which others, does not matter.
* Log-probs are computed in float32 from logits divided by the temperature, whatever the weights' dtype.
"""

from __future__ import annotations

import inspect
import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_rl.engines import Generation
from megatron_rl.errors import CheckpointError, ConfigError, RolloutError
from megatron_rl.rollouts.routes import route_dtype
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutHeader, SamplingTruth

# A progress bar for every load of new weights would hide the run's own output.
transformers.utils.logging.disable_progress_bar()

# transformers renamed this argument of every decoder between 5.x releases; the meaning stayed.
_CACHE = "cache" if "cache" in inspect.signature(Qwen3MoeForCausalLM.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class _Prefix:
    """Cached state of n input tokens."""

    kv: Tensor
    """model dtype [2 x layers, heads, n, head_dim]: keys and values interleaved by layer."""
    routes: Tensor
    """int64 [L, n, k]."""


class _PrefixStore:
    """Computed prefixes by their exact tokens; the least recently stored are dropped beyond `budget` tokens."""

    def __init__(self, budget: int) -> None:
        self._budget, self._size = budget, 0
        self._entries: OrderedDict[bytes, _Prefix] = OrderedDict()

    def longest(self, prompts: Sequence[np.ndarray]) -> list[_Prefix | None]:
        """For each prompt the longest stored proper prefix: at least one token must be computed, for its logits."""
        lengths = sorted({prefix.kv.shape[2] for prefix in self._entries.values()}, reverse=True)
        return [self._lookup(prompt, lengths) for prompt in prompts]

    def _lookup(self, prompt: np.ndarray, lengths: Iterable[int]) -> _Prefix | None:
        keys = (prompt[:n].tobytes() for n in lengths if n < len(prompt))
        return next((self._entries[key] for key in keys if key in self._entries), None)

    def add(self, tokens: np.ndarray, prefix: _Prefix) -> None:
        self._drop(tokens.tobytes())
        self._entries[tokens.tobytes()] = prefix
        self._size += len(tokens)
        while self._size > self._budget:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self._size -= dropped.kv.shape[2]


@dataclass
class _Batch:
    """B sequences in flight; S columns so far, of which each row uses those where `valid` is set."""

    cache: DynamicCache
    valid: Tensor
    """bool [B, S]."""
    routes: list[Tensor] = field(default_factory=list)
    """int64 [L, B, s, k] pieces; their s sum to S."""


class LocalEngine:
    """Generates with a Qwen3-MoE checkpoint inside this process.

    Args:
        path: HF checkpoint directory.
        dtype: dtype of the weights and of keys and values.
        temperature: logits are divided by it before sampling; greedy calls choose the arg max of the same distribution.
        device: torch device.
        seed: seed of all sampling.
        version: weight version of `path`.
        prefix_tokens: how many tokens' keys and values are kept for later calls; 0 prefills every call in full.

    Raises:
        ConfigError: the temperature is not positive, or the model is not a Qwen3-MoE with experts.
        CheckpointError: see `load`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        device: str | torch.device = "cpu",
        seed: int = 0,
        version: int = 0,
        prefix_tokens: int = 65_536,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(
                "temperature",
                found=temperature,
                expected="> 0",
                setting="rollout.temperature (greedy=True samples the arg max)",
            )
        self.dtype, self.temperature, self.device = dtype, temperature, torch.device(device)
        self._prefix_tokens = prefix_tokens
        self.reseed(seed)
        self.load(path, version)

    def reseed(self, seed: int) -> None:
        """Start sampling anew, so that a run that resumes at an iteration samples what it would have.

        Args:
            seed: below 2^64.
        """
        self._seed, self._new_streams = seed, itertools.count()

    def load(self, path: str | Path, version: int) -> None:
        """Replace the weights; generation from here on carries `version`.

        Raises:
            ConfigError: the checkpoint's model type is not ``qwen3_moe`` or no layer has experts.
            CheckpointError: unreadable, or tensors are missing, left over, or of another shape.
        """
        model = _read_model(Path(path), self.dtype).to(self.device).eval()
        routers = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
        if not routers:
            raise ConfigError("the model has no experts", file=path, field="num_experts", expected="a MoE layer")
        captured = [torch.empty(0)] * len(routers)
        for row, router in enumerate(routers.values()):
            router.register_forward_hook(_capture(captured, row))
        self.model, self.version, self.moe_layers = model, version, tuple(routers)
        self._captured = captured
        self._prefixes = _PrefixStore(self._prefix_tokens)

    def sleep(self) -> None:
        """Release the device until `wake`: weights go to the CPU, stored prefixes are dropped."""
        self.model.to("cpu")
        self._prefixes = _PrefixStore(self._prefix_tokens)

    def wake(self) -> None:
        """Bring the weights back to the device after `sleep`; no effect if awake."""
        self.model.to(self.device)

    def header(self, tokenizer_hash: str) -> RolloutHeader:
        """The header of rollouts recorded with this engine and this vocabulary."""
        config = self.model.config
        fingerprint = ModelFingerprint(
            architecture=config.model_type,
            vocab_size=config.vocab_size,
            num_experts=config.num_experts,
            topk=config.num_experts_per_tok,
            moe_layers=self.moe_layers,
            tokenizer_hash=tokenizer_hash,
        )
        engine = f"local/transformers-{transformers.__version__}"
        return RolloutHeader(fingerprint, SamplingTruth(temperature=self.temperature), engine)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        greedy: bool = False,
        streams: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Continue each of B prompts until a stop token or `max_new_tokens`.

        Args:
            prompts: B non-empty lists of ids in [0, V), ragged.
            max_new_tokens: most tokens to sample for each, >= 1.
            stop_tokens: ids that end a prompt's generation; the stop token is kept as its last token.
            greedy: take the arg max. For evaluation: the log-probs are still those of the tempered distribution.
            streams: see `TokenEngine`.

        Raises:
            RolloutError: a prompt is empty, holds an id outside the vocabulary, or does not fit with `max_new_tokens`
                into the model's positions.
        """
        rows = [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
        self._check(rows, max_new_tokens)
        if not rows:
            return []
        names = [next(self._new_streams) for _ in rows] if streams is None else streams
        logits, batch = self._prefill(rows)
        stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=self.device)
        open_rows = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        lengths = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        steps: list[tuple[Tensor, Tensor]] = []
        while True:
            steps.append(self._choose(logits, None if greedy else self._uniform(names, rows, len(steps))))
            lengths += open_rows
            open_rows = open_rows & ~torch.isin(steps[-1][0], stops)
            if len(steps) == max_new_tokens or not open_rows.any():
                break
            logits = self._forward(batch, steps[-1][0][:, None], open_rows[:, None])
        tokens, logprobs = (torch.stack(column, dim=1).cpu().numpy() for column in zip(*steps, strict=True))
        return self._collect(rows, batch, tokens.astype(np.int32), logprobs, lengths.tolist())

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-prob of each token given those before it, by one plain forward: no batch, no stored prefix.

        Returns:
            float32 [N], nats, under the temperature-scaled distribution; 0 at the first token.
        """
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=self.device)
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        chosen = self._log_softmax(logits).gather(1, ids[1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), chosen.cpu().numpy()])

    def _check(self, rows: Sequence[np.ndarray], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ConfigError("nothing to generate", field="max_new_tokens", found=max_new_tokens, expected=">= 1")
        config = self.model.config
        for row, prompt in enumerate(rows):
            if not len(prompt):
                raise RolloutError("empty prompt", row=row, field="prompts", found=0, expected=">= 1 token")
            if prompt.min() < 0 or prompt.max() >= config.vocab_size:
                raise RolloutError(
                    "id outside the vocabulary", row=row, field="prompts",
                    found=(int(prompt.min()), int(prompt.max())), expected=f"0..{config.vocab_size - 1}",
                )  # fmt: skip
            limit = config.max_position_embeddings
            if len(prompt) + max_new_tokens > limit:
                raise RolloutError(
                    "prompt too long for the model", row=row, field="prompts",
                    found=f"{len(prompt)} + {max_new_tokens}", expected=f"<= {limit}",
                    setting="batching.token_budget, or a model with more positions",
                )  # fmt: skip

    def _prefill(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, _Batch]:
        """Logits [B, V] after each prompt. Both the stored prefixes and the new tokens are aligned to the right."""
        prefixes = self._prefixes.longest(rows)
        batch = self._restore(prefixes)
        new = [row[prefix.kv.shape[2] if prefix else 0 :] for row, prefix in zip(rows, prefixes, strict=True)]
        width = max(map(len, new))
        ids = np.zeros((len(rows), width), dtype=np.int64)
        valid = np.zeros((len(rows), width), dtype=bool)
        for row, tokens in enumerate(new):
            ids[row, width - len(tokens) :] = tokens
            valid[row, width - len(tokens) :] = True
        logits = self._forward(batch, torch.from_numpy(ids).to(self.device), torch.from_numpy(valid).to(self.device))
        return logits, batch

    def _restore(self, prefixes: Sequence[_Prefix | None]) -> _Batch:
        """A batch whose row b holds prefix b, aligned to the right."""
        config = self.model.config
        width = max(prefix.kv.shape[2] if prefix else 0 for prefix in prefixes)
        shape = (2 * config.num_hidden_layers, len(prefixes), config.num_key_value_heads, width, config.head_dim)
        kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        routes = torch.zeros(
            (len(self.moe_layers), len(prefixes), width, config.num_experts_per_tok),
            dtype=torch.int64, device=self.device,
        )  # fmt: skip
        valid = torch.zeros((len(prefixes), width), dtype=torch.bool, device=self.device)
        for row, prefix in enumerate(prefixes):
            if prefix:
                start = width - prefix.kv.shape[2]
                kv[:, row, :, start:], routes[:, row, start:], valid[row, start:] = prefix.kv, prefix.routes, True
        cache = DynamicCache(config=config)
        if width:
            for layer in range(config.num_hidden_layers):
                cache.update(kv[2 * layer], kv[2 * layer + 1], layer)
        return _Batch(cache, valid, [routes])

    def _forward(self, batch: _Batch, ids: Tensor, valid: Tensor) -> Tensor:
        """Append a block of s columns and return float32 logits [B, V] of its last one.

        Args:
            batch: extended in place.
            ids: int64 [B, s]; where `valid` is 0 any id of the vocabulary, seen by no other column.
            valid: bool [B, s].
        """
        held, block = batch.valid.shape[1], ids.shape[1]
        positions = (batch.valid.sum(1, keepdim=True) + valid.cumsum(1) - 1).clamp(min=0)
        batch.valid = torch.cat([batch.valid, valid], dim=1)
        output = self.model(
            input_ids=ids, attention_mask=_attention_mask(batch.valid, held, self.dtype), position_ids=positions,
            use_cache=True, logits_to_keep=1, **{_CACHE: batch.cache},
        )  # fmt: skip
        batch.routes.append(torch.stack(self._captured).view(len(self.moe_layers), len(ids), block, -1))
        return output.logits[:, -1].float()

    def _log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / self.temperature, dim=-1)

    def _choose(self, logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids int64 [B] and their log-probs float32 [B].

        Args:
            uniform: float64 [B] in [0, 1), by which each row's distribution is inverted; None: take the arg max.
        """
        logprobs = self._log_softmax(logits)
        if uniform is None:
            chosen = logprobs.argmax(-1)
        else:
            cumulative = logprobs.double().exp().cumsum(-1)
            # The first id whose cumulative mass is greater, so that an id without mass is never chosen.
            chosen = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
        return chosen, logprobs.gather(1, chosen[:, None])[:, 0]

    def _uniform(self, names: Sequence[int], rows: Sequence[np.ndarray], step: int) -> Tensor:
        """float64 [B] in [0, 1): a hash of seed, stream and position."""
        keys = (struct.pack("<3Q", self._seed, name, len(row) + step) for name, row in zip(names, rows, strict=True))
        # 48 bits, so that no product with a mass near 1 rounds up to it.
        drawn = [(xxhash.xxh3_64_intdigest(key) >> 16) * 2.0**-48 for key in keys]
        return torch.tensor(drawn, dtype=torch.float64, device=self.device)

    def _collect(
        self,
        rows: Sequence[np.ndarray],
        batch: _Batch,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        lengths: Sequence[int],
    ) -> list[Generation]:
        """Extract each row's own columns from the batch; store its keys and values for the next call."""
        layers: list[Any] = batch.cache.layers
        kv = torch.stack([side for layer in layers for side in (layer.keys, layer.values)])
        routes = torch.cat(batch.routes, dim=2)
        dtype = route_dtype(self.model.config.num_experts)
        results = []
        for row, (prompt, n) in enumerate(zip(rows, lengths, strict=True)):
            columns = batch.valid[row].nonzero()[:, 0]
            prefix = _Prefix(kv[:, row, :, columns], routes[:, row, columns])
            self._prefixes.add(np.concatenate([prompt, tokens[row, : n - 1]]), prefix)
            used = prefix.routes.cpu().numpy().astype(dtype)
            results.append(Generation(tokens[row, :n], logprobs[row, :n], used, self.version))
        return results


def _attention_mask(valid: Tensor, held: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, s, S] for the last s = S - held columns: each sees valid columns up to itself.

    A padding column sees itself, so that no row of the softmax is empty (empty rows are NaN in some kernels, and a NaN
    value survives a weight of zero).
    """
    column = torch.arange(valid.shape[1], device=valid.device)
    query = column[held:, None]
    allowed = (valid[:, None, :] & (column <= query)) | (column == query)
    zero = torch.zeros((), dtype=dtype, device=valid.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)[:, None]


def _capture(captured: list[Tensor], row: int):
    """A forward hook that stores a router's chosen experts, int64 [tokens, k], in one row of `captured`."""

    def hook(_router: Qwen3MoeTopKRouter, _inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        captured[row] = output[2]

    return hook


def _read_model(path: Path, dtype: torch.dtype) -> Any:
    """Read a `Qwen3MoeForCausalLM` strictly: `transformers` itself only warns about tensors that it had to initialise.

    Any, because its `from_pretrained` and `to` are typed as if they took and returned other things.
    """
    read: Any = Qwen3MoeForCausalLM.from_pretrained
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        if config.model_type != "qwen3_moe":
            raise ConfigError(
                "model family", file=path, field="model_type", found=config.model_type, expected="qwen3_moe"
            )
        model, report = read(path, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError("unreadable checkpoint", file=path, found=error, expected="an HF directory") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise CheckpointError("tensors do not fit the model", file=path, found=wrong, expected="every tensor, once")
    return model
