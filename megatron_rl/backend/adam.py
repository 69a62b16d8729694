"""AdamW that counts steps per parameter group, as Transformer Engine's and Apex's do.

Megatron's distributed optimizer saves and reshards one step count per group; torch's AdamW keeps one per tensor, so a
checkpoint of it fails before the first step and on ranks that own no element. Used where neither library is installed.
"""

from __future__ import annotations

import torch


class GroupStepAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (arXiv 1711.05101) with bias correction.

    p ← p (1 − lr·wd);  m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  p ← p − lr · m̂ / (√v̂ + ε).

    Args:
        params: tensors or parameter groups; each group may carry its own ``lr`` and ``weight_decay``.
        adam_w_mode: only decoupled decay is offered; anything else is refused.
        capturable: asked for by Megatron from 0.19 on; a CPU captures no graphs.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
    ):
        if not (adam_w_mode and bias_correction):
            raise ValueError("GroupStepAdamW decouples weight decay and corrects bias; no other mode is offered")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        )
        for group in self.param_groups:
            group.setdefault("step", 0)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient; groups count steps whether or not they own any."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict, params: list[torch.Tensor]) -> None:
        (beta1, beta2), step, lr = group["betas"], group["step"], group["lr"]
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        grads = [p.grad.to(p.dtype) for p in params if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(moments, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**step))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, moments, denominators, -lr / (1 - beta1**step))
