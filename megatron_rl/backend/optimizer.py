"""Megatron's optimizer on summed gradients, clipped by the true global norm; a non-finite norm skips the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl.backend import platform
from megatron_rl.backend.model import Model
from megatron_rl.backend.parameters import local_parameters, main_copies, optimizer_shards, replicas
from megatron_rl.config import OptimizerConfig


@dataclass
class Optimizer:
    """One model's optimizer and its schedule. `steps` counts completed steps only."""

    model: Model
    config: OptimizerConfig
    megatron: MegatronOptimizer
    steps: int = 0

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's chained optimizers, one for dense and one for expert parameters; those without parameters are
        left out."""
        chained = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]

    def learning_rate(self) -> float:
        """Rate of the next step: linear warm-up, then constant or linear decay to `min_lr`."""
        config, step = self.config, self.steps + 1
        if step <= config.warmup_steps:
            return config.lr * step / config.warmup_steps
        if not config.decay_steps:
            return config.lr
        decayed = min(1.0, (step - config.warmup_steps) / config.decay_steps)
        return config.lr + decayed * (config.min_lr - config.lr)

    @torch.no_grad()
    def step(self) -> tuple[bool, float]:
        """Clip on the global norm g·min(1, c/(‖g‖+1e-6)) and update.

        Returns:
            (whether parameters changed, the global gradient norm before clipping). A non-finite norm changes nothing.
        """
        for group in self.megatron.param_groups:
            group["lr"] = self.learning_rate()
            # Megatron marks norms and biases with wd_mult 0 and leaves it to its own scheduler, unused here, to apply.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.prepare_grads()
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            return False, norm
        for part in self.parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.config.clip_grad, total_norm=norm)
        self.megatron.step_with_ready_grads()
        # The float32 optimizer hands Megatron's gradient buffer to torch: left there, backward would add to it twice.
        self.megatron.zero_grad()
        self.steps += 1
        return True, norm

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """‖g‖₂ over every distinct parameter of the model, float64.

        Megatron before 0.19 leaves expert gradients of all but the first tensor-parallel rank out of the norm under
        expert + tensor parallelism (Megatron-LM#5916): it infers from a parameter's `tensor_model_parallel` mark
        whether ranks hold copies of it. Here each squared gradient is divided by the number of ranks that hold it,
        known from the conversion table's split. Can go when 0.19 is the oldest supported version.
        """
        square = torch.zeros((), dtype=torch.float64, device=platform.device())
        by_parameter = {id(local.tensor): local for local in local_parameters(self.model)}
        sharded = self.model.topology.config.distributed_optimizer
        for part in self.parts:
            for main, parameter in main_copies(part):
                local = by_parameter[id(parameter)]
                if main.grad is not None and not local.shared:
                    holders = replicas(self.model, local) // (optimizer_shards(self.model, local) if sharded else 1)
                    square += main.grad.double().square().sum() / holders
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def zero_grad(self) -> None:
        """Drop gradients."""
        self.megatron.zero_grad()
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()


def build_optimizer(model: Model, config: OptimizerConfig) -> Optimizer:
    """AdamW over a model's parameters, sharded over data ranks where the layout says so.

    Gradients of a step are summed over micro-batches and data ranks and never divided: `_sum_gradients` passes no
    token count to Megatron.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=model.topology.config.distributed_optimizer,
        clip_grad=config.clip_grad,
    )
    model.config.finalize_model_grads_func = _sum_gradients
    return Optimizer(model, config, get_megatron_optimizer(settings, model.chunks))


def _sum_gradients(chunks, num_tokens=None, pg_collection=None, force_all_reduce=False):
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
