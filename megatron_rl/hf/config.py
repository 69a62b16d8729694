"""An HF model's shape, read straight from config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.hf.architecture import Clamp, Latent, Rotary, Router, Window
from megatron_rl.hf.families import FAMILIES, REFUSED
from megatron_rl.hf.families.family import Family
from megatron_rl.hf.json_files import read_json
from megatron_rl.hf.quantised import read_scheme
from megatron_rl.hf.settings import Settings
from megatron_rl.hf.table import Head, Size


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
    """Of queries and keys; under latent attention both parts together."""
    ffn_size: int
    """Intermediate size of dense layers."""
    moe_ffn_size: int
    """Intermediate size of one expert; 0 in dense models."""
    num_experts: int
    """0 in dense models, as is `topk`."""
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
    rotary: Rotary = Rotary()
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: none, per head, or over all heads together."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Output projections and experts have biases."""
    router: Router = Router()
    latent: Latent | None = None
    """None: grouped-query attention."""
    shared_ffn_size: int = 0
    """Intermediate size of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid gate."""
    window: Window | None = None
    sinks: bool = False
    """One learned logit per head joins each softmax and takes weight from the keys."""
    clamp: Clamp | None = None
    """None: SwiGLU."""
    mtp_layers: int = 0
    """Multi-token-prediction layers the checkpoint may hold after its decoder layers; they are not built."""
    keep_mtp: bool = False
    """Exports copy those layers from the source checkpoint; otherwise they leave them out."""

    def size(self, size: Size) -> int:
        """The number behind a symbolic dimension of a family's table."""
        return self._sizes()[size]

    def _sizes(self) -> dict[str, int]:
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "heads": self.num_heads,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "attention_out": self.num_heads * self.head_dim,
            "ffn": self.ffn_size,
            "moe_ffn": self.moe_ffn_size,
            "shared_ffn": self.shared_ffn_size,
            "experts": self.num_experts,
            "one": 1,
        } | (self._latent_sizes(self.latent) if self.latent else {})

    def _latent_sizes(self, latent: Latent) -> dict[str, int]:
        return {
            "q_rank": latent.q_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank_and_rope": latent.kv_rank + latent.rope_dim,
            "kv_expanded": self.num_heads * (latent.plain_dim + latent.value_dim),
            "attention_out": self.num_heads * latent.value_dim,
        }

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normalised."""
        return self.qk_norm != "none"

    @property
    def compresses_query(self) -> bool:
        """Latent attention with a compressed query."""
        return self.latent is not None and self.latent.q_rank is not None

    @property
    def projects_query(self) -> bool:
        """Latent attention without a compressed query."""
        return self.latent is not None and self.latent.q_rank is None

    @property
    def has_shared_expert(self) -> bool:
        """A shared expert sees every token."""
        return self.shared_ffn_size > 0

    @property
    def has_expert_bias(self) -> bool:
        """Experts are chosen with a bias."""
        return self.router.expert_bias

    def as_critic(self) -> HFModelConfig:
        """The same backbone with a value head in place of the vocabulary head, no prediction layers."""
        return replace(self, head="value", keep_mtp=False)


def read_hf_config(path: str | Path, *, mtp: Literal["drop", "keep"] = "drop") -> HFModelConfig:
    """Read `config.json` of a checkpoint directory (or the file itself).

    Args:
        path: checkpoint directory, or config.json.
        mtp: what exports do with multi-token-prediction layers (see `hf.inventory`).

    Raises:
        CheckpointError: a setting is missing, of the wrong type, contradictory, or one the conversion does not support.
            `field` names the setting.
        ConfigError: a family that Megatron-Core cannot train; the message says what it lacks.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    raw = Settings(read_json(file), file)
    family, head = _architecture(raw)
    read_scheme(raw.values, raw.file)
    config = HFModelConfig(
        model_type=family.model_type,
        head=head,
        **(_common(raw) | family.read(raw)),
        keep_mtp=mtp == "keep" and head == "lm",
    )
    _check_consistent(config, file)
    return config


def _architecture(raw: Settings) -> tuple[Family, Head]:
    model_type = raw.get("model_type")
    if model_type in REFUSED:
        raise ConfigError(
            f"{model_type} cannot be trained: {REFUSED[model_type]}",
            file=raw.file,
            field="model_type",
            found=model_type,
            expected=f"one of {sorted(FAMILIES)}",
        )
    if model_type not in FAMILIES:
        raise raw.fault("model_type", model_type, f"one of {sorted(FAMILIES)}", "unsupported model family")
    family, found = FAMILIES[model_type], raw.get("architectures") or []
    if len(found) != 1 or found[0] not in family.architectures:
        raise raw.fault("architectures", found, f"one of {sorted(family.architectures)}", "unsupported architecture")
    return family, family.architectures[found[0]]


def _common(raw: Settings) -> dict[str, Any]:
    """Fields that every family spells the same; families override those they spell otherwise."""
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    return dict(
        num_layers=raw.size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=raw.size("num_key_value_heads", heads),
        head_dim=raw.size("head_dim", hidden // heads),
        moe_ffn_size=0,
        num_experts=0,
        topk=0,
        norm_topk_prob=False,
        moe_layers=(),
        rms_norm_eps=raw.positive("rms_norm_eps"),
        vocab_size=raw.size("vocab_size"),
        tied_embeddings=raw.flag("tie_word_embeddings", default=False),
        max_positions=raw.size("max_position_embeddings"),
        router_aux_loss_coef=float(raw.get("router_aux_loss_coef") or 0.0),
    )


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
    groups = config.router.groups
    if groups and (
        config.num_experts % groups.count or config.topk > groups.chosen * config.num_experts // groups.count
    ):
        raise CheckpointError(
            "experts do not divide into routing groups",
            file=file,
            field="n_group",
            found=f"{config.num_experts} experts in {groups.count} groups, {groups.chosen} chosen",
            expected=f"equal groups that hold at least {config.topk} experts together",
        )
