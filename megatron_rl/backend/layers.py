"""Layers of one chunk, and the modules Megatron lacks or that only its Transformer Engine spec has."""

from __future__ import annotations

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.backend import platform
from megatron_rl.backend.attention import PackedCausalAttention, SinkAttention
from megatron_rl.hf.config import HFModelConfig


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark by which Megatron sums its gradient over sequence shards.

    Megatron's wrapper of the torch norm refuses sequence parallelism, which MoE layers need at TP > 1; on a sequence
    shard the plain norm is right, and only the mark is missing.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=platform.device_of_new_parameters(config)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class QueryNorm(torch.nn.Module):
    """RMSNorm over all query heads together (OLMoE): y = w ⊙ x / √(mean x² + ε), the mean over heads · head_dim.

    Forward: [..., heads / TP, head_dim] → the same. Heads and weights are cut over tensor-parallel ranks, so the sum of
    squares is reduced over them, in forward and in backward.
    """

    heads = "num_attention_heads"

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps, self.width = eps, hidden_size * getattr(config, self.heads)
        ranks = mpu.get_tensor_model_parallel_world_size()
        device = platform.device_of_new_parameters(config)
        self.weight = torch.nn.Parameter(torch.ones(self.width // ranks, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """See the class."""
        flat = heads.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)
        normal = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normal.to(heads.dtype)).view_as(heads)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Cut over tensor-parallel ranks in dimension 0."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class KeyNorm(QueryNorm):
    """RMSNorm over all key heads together."""

    heads = "num_query_groups"


class ReplicatedLinear(torch.nn.Module):
    """y = x Wᵀ with the whole W on every tensor-parallel rank, each of which sees its sequence shard."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = platform.device_of_new_parameters(config)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s/tp, 1, inputs] → [s/tp, 1, outputs], and the (None) bias Megatron expects."""
        return torch.nn.functional.linear(hidden, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Replicated over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with whole compressions on every rank, as its Transformer Engine spec has them.

    The local spec cuts them by columns and gathers the result over tensor-parallel ranks. Backward of that gather keeps
    a rank's own slice without summing, but the shared rotary key is read by every rank's heads: at TP > 1 its gradient,
    and all below it, would lack the other ranks' part.
    """

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, width, config)

    def _resolve_qk_norm_config(self, submodules) -> dict:
        """Called by Megatron-Core from 0.19 on, whose version would normalise the input of an uncompressed query."""
        compressed = self.config.q_lora_rank is not None
        return {
            "linear_q_proj": IdentityOp if compressed else submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj if compressed else IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm,
            "kv_layernorm": submodules.kv_layernorm,
        }


def layer_spec(hf: HFModelConfig, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of one chunk: Transformer Engine's where it is installed, else Megatron's local ones with our norm and
    attention."""
    if config.transformer_impl == "transformer_engine":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        spec.layer_norm = SequenceParallelRMSNorm
        for layer in spec.layer_specs:
            _use_local_parts(layer.submodules, hf)
    if hf.qk_norm == "all":
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    return spec


def _use_local_parts(parts, hf: HFModelConfig) -> None:
    attention = parts.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention.core_attention = SinkAttention if hf.sinks or hf.window is not None else PackedCausalAttention
    if hf.latent is not None:
        parts.self_attention.module = LatentAttention
        attention.kv_layernorm = SequenceParallelRMSNorm
        attention.q_layernorm = SequenceParallelRMSNorm if hf.compresses_query else IdentityOp
    elif hf.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm


def own_expert_outputs(chunk: torch.nn.Module) -> None:
    """Let the second matrix of every expert return memory of its own.

    Where experts have biases, Megatron adds the weighted bias to it in place, which autograd refuses for a view of what
    a custom function returned.
    """
    for name, module in chunk.named_modules():
        if ".mlp.experts.local_experts." in name and name.endswith(".linear_fc2"):
            module.register_forward_hook(lambda _module, _inputs, output: (output[0].clone(), *output[1:]))
