"""Actor and critic as Megatron `GPTModel`s: configuration, layer spec, head, data-parallel wrapper."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_rl.backend import platform
from megatron_rl.backend.layers import layer_spec, own_expert_outputs
from megatron_rl.backend.logprobs import KeepHidden, ValueHead
from megatron_rl.backend.replay import RouteRegistry, group_limited
from megatron_rl.backend.topology import Topology, check_model_fits
from megatron_rl.config import ParallelConfig, PerformanceConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hf.config import HFModelConfig

Role = Literal["policy", "value"]


class ReleasableDataParallel(DistributedDataParallel):
    """Megatron's data-parallel wrapper, whose hooks do not keep it alive.

    Megatron hangs a function that holds the wrapper on each parameter's gradient accumulator, which the wrapper holds.
    Once backward has run, Python's collector cannot see through that cycle: a model that went out of use would keep its
    memory and, through its process groups, their threads.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter):
        wrapper, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused):
            return DistributedDataParallel._make_backward_post_hook(wrapper(), parameter())(*unused)

        return hook


@dataclass
class Model:
    """The live chunks of one model on this rank."""

    role: Role
    hf: HFModelConfig
    config: TransformerConfig
    topology: Topology
    chunks: list[DistributedDataParallel]
    """What Megatron's schedules run: wrapped for data parallelism."""
    bare: list[GPTModel]
    """The same, unwrapped."""
    registry: RouteRegistry

    def output_weight(self) -> torch.Tensor:
        """[V/tp, h] rows of the (possibly tied) output layer on the last stage."""
        last = self.bare[-1]
        if last.share_embeddings_and_output_weights:
            return last.shared_embedding_or_output_weight()
        return last.output_layer.weight

    def train(self, mode: bool = True) -> None:
        """Training mode. Nothing here drops out, so log-probs are the same either way; kept for what users plug in."""
        for chunk in self.chunks:
            chunk.train(mode)


def transformer_config(
    hf: HFModelConfig,
    parallel: ParallelConfig,
    performance: PerformanceConfig,
    dtype: torch.dtype,
    *,
    meta: bool = False,
) -> TransformerConfig:
    """Megatron's configuration of an HF model under a layout.

    Args:
        hf: what config.json says.
        parallel, performance: the layout and Megatron's switches.
        dtype: of parameters and activations.
        meta: build parameters on the meta device (planning).

    Raises:
        ConfigError: the layout does not divide the model.
    """
    check_model_fits(
        parallel,
        heads=hf.num_heads,
        kv_heads=hf.num_kv_heads,
        experts=hf.num_experts if hf.moe_layers else 0,
        layers=hf.num_layers,
        ffn=hf.moe_ffn_size,
    )
    _check_widths(hf, parallel)
    kind = TransformerConfig if hf.latent is None else MLATransformerConfig
    numerics = _numerics(dtype, performance, meta)
    config = kind(**_shape(hf), **_layout(parallel, hf), **(numerics | _latent(hf)), **_recompute(parallel))
    for name, value in _stretched_rotary(hf).items():
        setattr(config, name, value)
    return config


def _check_widths(hf: HFModelConfig, parallel: ParallelConfig) -> None:
    dense = hf.ffn_size if len(hf.moe_layers) < hf.num_layers else 0
    for what, width in (("dense intermediate width", dense), ("shared expert's width", hf.shared_ffn_size)):
        if width % parallel.tensor:
            raise ConfigError(
                f"the {what} does not divide over parallel.tensor",
                found=f"{width} over {parallel.tensor}",
                expected="a divisor",
                setting="parallel.tensor",
            )

    if hf.linear_bias and parallel.expert_tensor > 1:
        raise ConfigError(
            "experts with biases cannot be cut by Megatron-Core",
            found=f"{hf.model_type} over {parallel.expert_tensor}",
            expected="1",
            setting="parallel.expert_tensor",
        )


def _shape(hf: HFModelConfig) -> dict:
    shape = dict(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.ffn_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=hf.has_qk_norm or hf.latent is not None,
        add_qkv_bias=hf.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu if hf.clamp is None else quick_gelu,
        activation_func_clamp_value=None if hf.clamp is None else hf.clamp.limit,
        glu_linear_offset=0.0 if hf.clamp is None else 1.0,
        add_bias_linear=hf.linear_bias,
        softmax_type="learnable" if hf.sinks else "vanilla",
        window_size=None if hf.window is None else (hf.window.size - 1, 0),
        window_attn_skip_freq=None if hf.window is None else [int(i in hf.window.layers) for i in range(hf.num_layers)],
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return shape | _experts(hf) if hf.moe_layers else shape


def _experts(hf: HFModelConfig) -> dict:
    sigmoid = hf.router.score == "sigmoid"
    return dict(
        num_moe_experts=hf.num_experts,
        moe_router_topk=hf.topk,
        moe_ffn_hidden_size=hf.moe_ffn_size,
        moe_layer_freq=[int(i in hf.moe_layers) for i in range(hf.num_layers)],
        moe_router_score_function=hf.router.score,
        # Softmax after the top-k renormalises over the chosen; before it keeps the raw shares.
        moe_router_pre_softmax=sigmoid or not hf.norm_topk_prob,
        moe_router_topk_scaling_factor=None if hf.router.scaling == 1 else hf.router.scaling,
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=hf.has_expert_bias,
        # The bias is meant to balance native routing, which replay replaces: it stays as imported.
        moe_router_bias_update_rate=0.0,
        moe_shared_expert_intermediate_size=hf.shared_ffn_size or None,
        moe_shared_expert_gate=hf.shared_gate,
        # Router losses are ours (backend/replay.py): Megatron's are products of means per micro-batch.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _latent(hf: HFModelConfig) -> dict:
    if hf.latent is None:
        return {}
    rotary = hf.rotary
    stretched = dict(
        rotary_scaling_factor=rotary.factor,
        original_max_position_embeddings=rotary.original_positions,
        beta_fast=rotary.beta_fast,
        beta_slow=rotary.beta_slow,
    )
    return dict(
        q_lora_rank=hf.latent.q_rank,
        kv_lora_rank=hf.latent.kv_rank,
        qk_head_dim=hf.latent.plain_dim,
        qk_pos_emb_head_dim=hf.latent.rope_dim,
        v_head_dim=hf.latent.value_dim,
        rotary_base=hf.rope_theta,
        rope_type="yarn" if rotary.kind == "yarn" else "rope",
        mscale=rotary.mscale,
        mscale_all_dim=rotary.mscale_all_dim,
        apply_rope_fusion=False,
        **(stretched if rotary.kind == "yarn" else {}),
    )


def _stretched_rotary(hf: HFModelConfig) -> dict:
    """What Megatron reads from its configuration for YaRN outside latent attention, though it has no fields for it."""
    if hf.latent is not None or hf.rotary.kind != "yarn":
        return {}
    return dict(
        yarn_rotary_scaling_factor=hf.rotary.factor,
        yarn_original_max_position_embeddings=hf.rotary.original_positions,
        yarn_beta_fast=hf.rotary.beta_fast,
        yarn_beta_slow=hf.rotary.beta_slow,
        yarn_mscale=hf.rotary.mscale,
        yarn_mscale_all_dim=hf.rotary.mscale_all_dim,
        yarn_correction_range_round_to_int=hf.rotary.whole_dimensions,
    )


def _layout(parallel: ParallelConfig, hf: HFModelConfig) -> dict:
    interleaved = parallel.virtual_pipeline > 1
    return dict(
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        pipeline_model_parallel_layout=parallel.pipeline_layout,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert if hf.moe_layers else 1,
        expert_tensor_parallel_size=parallel.expert_tensor,
        # Under interleaving, batched point-to-point calls hang on gloo; overlapped single ones do not.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # All micro-batches of a step have one length: variable lengths deadlock at deep pipelines.
        variable_seq_lengths=False,
    )


def _numerics(dtype: torch.dtype, performance: PerformanceConfig, meta: bool) -> dict:
    fused = platform.have_transformer_engine()
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # The loss carries global loss weights (batching and reduce): Megatron sums and nothing divides.
        calculate_per_token_loss=True,
        use_cpu_initialization=not platform.on_gpu() and not meta,
        init_model_with_meta_device=meta,
        perform_initialization=False,
        gradient_accumulation_fusion=performance.gradient_accumulation_fusion,
        bias_activation_fusion=fused,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        persist_layer_norm=False,
        moe_grouped_gemm=performance.moe_grouped_gemm,
        moe_token_dispatcher_type=performance.moe_dispatcher,
        moe_permute_fusion=performance.moe_permute_fusion,
        transformer_impl="transformer_engine" if fused else "local",
    )


def _recompute(parallel: ParallelConfig) -> dict:
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "selective":
        return dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def padded_vocab(hf: HFModelConfig, parallel: ParallelConfig, multiple: int) -> int:
    """Vocabulary rows after padding to `multiple`·TP."""
    unit = multiple * parallel.tensor
    return -(-hf.vocab_size // unit) * unit


def build_chunks(
    hf: HFModelConfig, config: TransformerConfig, topology: Topology, role: Role, vocab_multiple: int = 1
) -> list[GPTModel]:
    """This rank's bare chunks with their role's head, parameters uninitialised (they are imported or loaded)."""
    vocab = padded_vocab(hf, topology.config, vocab_multiple)
    stages = range(topology.config.virtual_pipeline) if topology.config.virtual_pipeline > 1 else [None]
    with platform.on_meta() if config.init_model_with_meta_device else contextlib.nullcontext():
        chunks = [_build_chunk(hf, config, topology, role, vocab, vp) for vp in stages]
    if hf.qk_norm == "all":
        # Megatron builds norms of queries and keys by this setting, and sums their gradients over tensor-parallel ranks
        # by it and by name: norms over all heads are cut over those ranks instead (backend/layers.py).
        config.qk_layernorm = False
    return chunks


def _build_chunk(hf, config, topology: Topology, role: Role, vocab: int, vp: int | None) -> GPTModel:
    last_vp = vp is None or vp == topology.config.virtual_pipeline - 1
    chunk = GPTModel(
        config,
        layer_spec(hf, config, vp),
        vocab_size=vocab,
        max_sequence_length=hf.max_positions,
        pre_process=topology.first_stage and not vp,
        post_process=topology.last_stage and last_vp,
        share_embeddings_and_output_weights=role == "policy" and hf.tied_embeddings,
        position_embedding_type="yarn" if _stretched_rotary(hf) else "rope",
        rotary_base=hf.rope_theta,
        rotary_percent=hf.rotary.fraction,
        rope_scaling=hf.rotary.kind == "llama3",
        rope_scaling_factor=hf.rotary.factor,
        vp_stage=vp,
    )
    if hf.linear_bias:
        own_expert_outputs(chunk)
    if chunk.post_process:
        chunk.output_layer = (
            KeepHidden(chunk.output_layer)
            if role == "policy"
            else ValueHead(
                hf.hidden_size,
                dtype=config.params_dtype,
                sequence_parallel=config.sequence_parallel,
                device=platform.device_of_new_parameters(config),
            )
        )
    return chunk


def _mark_experts(chunk: GPTModel) -> None:
    """Reduce expert gradients over the expert-data group in every layout.

    Megatron does so only when EP > 1. With EP = 1 and expert-TP ≠ TP it would leave out the sum over tensor-parallel
    ranks, each of which saw other tokens. Marking always also keeps one optimizer structure (dense, then experts) in
    every layout, so that checkpoints reshard to and from EP = 1. An expert's bias also bears the mark of sequence
    parallelism, by which Megatron would add up the gradients of different experts' biases over tensor-parallel ranks.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False


def route_registry(hf: HFModelConfig, chunks: list[GPTModel]) -> RouteRegistry:
    """Registry of all routers of these bare chunks; natively they choose as the family does."""
    return RouteRegistry(chunks, group_limited(hf.router.groups) if hf.router.groups else None)


def build_model(
    hf: HFModelConfig,
    config: TransformerConfig,
    topology: Topology,
    role: Role,
    *,
    vocab_multiple: int = 1,
) -> Model:
    """Build this rank's part of a model, wrapped for data-parallel training.

    Args:
        hf, config: from `hf.read_hf_config` and `transformer_config`; `config` must not be shared with another model.
        topology: the layout's groups.
        role: `policy` (log-probs) or `value` (critic).
        vocab_multiple: padding of the vocabulary.
    """
    bare = build_chunks(hf, config, topology, role, vocab_multiple)
    bare = [chunk.to(platform.device()) for chunk in bare]
    for chunk in bare:
        _mark_experts(chunk)
    registry = route_registry(hf, bare)
    wrapped = [Float16Module(config, chunk) for chunk in bare] if config.bf16 else bare
    for handle in registry.handles:
        # Float16Module casts buffers too; the bias decides near ties and is stored in float32.
        handle.router._maintain_float32_expert_bias()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=topology.config.distributed_optimizer,
        average_in_collective=False,
    )
    chunks = [ReleasableDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(wrapped)]
    return Model(role, hf, config, topology, chunks, bare, registry)
