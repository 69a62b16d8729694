"""An HF model's shape, read straight from config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.families import ARCHITECTURES
from megatron_rl.hf.files import read_json
from megatron_rl.hf.table import Head, Size

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
"""Settings the conversion handles at one value only. Absent means that value, as in transformers' own defaults."""


@dataclass(frozen=True)
class HFModelConfig:
    """What conversion, the backend and the fingerprint need to know of a model. Sizes are unsharded and unpadded."""

    model_type: str
    """HF `model_type`, for instance ``qwen3_moe``."""
    head: Head
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Query groups."""
    head_dim: int
    ffn_size: int
    """Intermediate size of dense layers."""
    moe_ffn_size: int
    """Intermediate size of one expert."""
    num_experts: int
    topk: int
    norm_topk_prob: bool
    """Whether the k chosen router probabilities are rescaled to sum to 1."""
    moe_layers: tuple[int, ...]
    """0-based decoder layers with experts, ascending; the others are dense."""
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    router_aux_loss_coef: float
    """As recorded; nothing here applies it."""

    def size(self, size: Size) -> int:
        """The number behind a symbolic dimension of a family's table."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn_size,
            "moe_ffn": self.moe_ffn_size,
            "experts": self.num_experts,
            "one": 1,
        }[size]

    def as_critic(self) -> HFModelConfig:
        """The same backbone with a value head in place of the vocabulary head."""
        return replace(self, head="value")


def read_hf_config(path: str | Path) -> HFModelConfig:
    """Read `config.json` of a checkpoint directory (or the file itself).

    Raises:
        CheckpointError: a setting is missing, of the wrong type, contradictory, or one the conversion does not support.
            `field` names the setting.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    raw = _Settings(read_json(file), file)
    model_type, head = _architecture(raw)
    _refuse_unsupported(raw)
    layers, hidden, heads = (raw.size(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    config = HFModelConfig(
        model_type=model_type,
        head=head,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=raw.size("num_key_value_heads"),
        head_dim=raw.size("head_dim") if raw.get("head_dim") is not None else hidden // heads,
        ffn_size=raw.size("intermediate_size"),
        moe_ffn_size=raw.size("moe_intermediate_size"),
        num_experts=raw.size("num_local_experts" if "num_local_experts" in raw.values else "num_experts"),
        topk=raw.size("num_experts_per_tok"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        moe_layers=_moe_layers(raw, layers),
        rope_theta=_rope_theta(raw),
        rms_norm_eps=raw.positive("rms_norm_eps"),
        vocab_size=raw.size("vocab_size"),
        tied_embeddings=raw.flag("tie_word_embeddings", default=False),
        max_positions=raw.size("max_position_embeddings"),
        router_aux_loss_coef=float(raw.get("router_aux_loss_coef") or 0.0),
    )
    _check_consistent(config, file)
    return config


@dataclass(frozen=True)
class _Settings:
    """Typed access to the raw JSON; every refusal names file and setting."""

    values: dict[str, Any]
    file: Path

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def size(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(key, value, "a positive integer")
        return value

    def positive(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.fault(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false")
        return value

    def fault(self, key: str, found: Any, expected: str, what: str = "bad model setting") -> CheckpointError:
        shown = "nothing" if found is None else repr(found)
        return CheckpointError(what, file=self.file, field=key, found=shown, expected=expected)


def _architecture(raw: _Settings) -> tuple[str, Head]:
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        raise raw.fault("model_type", model_type, f"one of {sorted(ARCHITECTURES)}", "unsupported model family")
    heads = ARCHITECTURES[model_type]
    found = raw.get("architectures") or []
    if len(found) != 1 or found[0] not in heads:
        raise raw.fault("architectures", found, f"one of {sorted(heads)}", "unsupported architecture")
    return model_type, heads[found[0]]


def _refuse_unsupported(raw: _Settings) -> None:
    for key, allowed in _ALLOWED.items():
        if key in raw.values and raw.get(key) not in allowed:
            raise raw.fault(key, raw.get(key), f"{allowed[0]!r}", "unsupported model setting")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise raw.fault("layer_types", sorted(kinds), "only full_attention", "unsupported model setting")


def _rope_theta(raw: _Settings) -> float:
    """The rotary base: at the top level up to transformers 4, inside `rope_parameters` from 5 on. Never defaulted."""
    places = []
    for key in ("rope_scaling", "rope_parameters"):
        nested = raw.get(key) or {}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default" or nested.get("partial_rotary_factor", 1.0) != 1.0:
            raise raw.fault(key, nested, "plain rotary embedding", "unsupported rotary scaling")
        places.append(nested.get("rope_theta"))
    found = {float(theta) for theta in (raw.get("rope_theta"), *places) if theta is not None}
    if len(found) != 1:
        raise raw.fault("rope_theta", sorted(found) or None, "one value, at the top level or in rope_parameters")
    return _Settings({"rope_theta": found.pop()}, raw.file).positive("rope_theta")


def _moe_layers(raw: _Settings, layers: int) -> tuple[int, ...]:
    """Layer i has experts when it is not in `mlp_only_layers` and i + 1 is a multiple of `decoder_sparse_step`."""
    step = raw.size("decoder_sparse_step") if "decoder_sparse_step" in raw.values else 1
    dense = set(raw.get("mlp_only_layers") or ())
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _check_consistent(config: HFModelConfig, file: Path) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            "query heads do not divide into groups",
            file=file,
            field="num_key_value_heads",
            found=config.num_kv_heads,
            expected=f"a divisor of {config.num_heads}",
        )
    if config.topk > config.num_experts:
        raise CheckpointError(
            "more experts per token than experts",
            file=file,
            field="num_experts_per_tok",
            found=config.topk,
            expected=f"at most {config.num_experts}",
        )
