"""Rollout Routing Replay (arXiv 2510.11370): recorded expert ids take the place of every router's top-k.

Routes belong to a micro-batch, handles belong to a model: a registry walks the live model's routers, each of which
carries its layer number, so actor, critic, reference and MTP layers never mix. Gate weights are still computed from the
training logits over the replayed ids with the model's own score function, so routers keep their gradients.

Invariants (violations raise RouteError):

* A router call inside our forward step is a forward, outside it a recompute.
* A forward that autograd does not record (inside an activation checkpoint) is recomputed exactly once, in the order of
  the micro-batches of its model chunk; recompute sees the rows its forward saw.
* After a step, every handle was called exactly micro-batches × (1 + recomputed) times and holds no rows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.errors import ConfigError, RouteError
from megatron_rl.hf.architecture import Groups

MISSING = -1
"""Id of a row that was not recorded: the router chooses natively for it."""
TopK = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(scores float [t, E], k) → (the chosen scores [t, k], their experts int64 [t, k])."""


@dataclass(frozen=True)
class RouterRows:
    """What one micro-batch asks of the routers on this rank. t tokens: this rank's context and sequence shard."""

    routes: dict[int, torch.Tensor] | None
    """0-based decoder layer → int64 [t, k] expert ids (MISSING for unrecorded rows), or None: route natively."""
    real: torch.Tensor
    """bool [t]: tokens that were recorded, neither padding nor a sequence's last token. Only they are counted."""
    aux_weights: torch.Tensor | None = None
    """float32 [t]: weight of each token in the router losses: 1 / real tokens of the optimizer step; 0 at padding."""


@dataclass
class RouterLosses:
    """Router losses of one optimizer step, linear in tokens because expert frequencies come from the whole step."""

    aux_coef: float = 0.0
    z_coef: float = 0.0
    frequencies: dict[int, torch.Tensor] = field(default_factory=dict)
    """0-based decoder layer → float32 [E]: share of the step's (token, choice) pairs that went to each expert."""


class RouterHandle:
    """Hooks one router: replaces its top-k by recorded experts, counts agreement and load, attaches router losses."""

    def __init__(self, router: TopKRouter, layer: int, registry: RouteRegistry) -> None:
        self.router, self.layer, self.registry = router, layer, registry
        self.pending: deque[RouterRows] = deque()
        self.calls = 0
        self.recorded: torch.Tensor | None = None
        self._route = router.routing
        router.router_replay = self
        router.routing = self.routing
        self.reset_counts()

    def reset_counts(self) -> None:
        """Zero the counts and sums of the previous step."""
        device = self.router.weight.device
        self.agreed = torch.zeros(2, dtype=torch.float64, device=device)
        self.missing = torch.zeros(2, dtype=torch.float64, device=device)
        self.load = torch.zeros(self.router.num_experts, dtype=torch.float64, device=device)
        """Recorded tokens by natively chosen expert; empty under replay, where the record says it."""
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        self.margin = torch.full((), torch.inf, device=device)

    def routing(self, logits: torch.Tensor, *args, **kwargs):
        """Takes the place of `TopKRouter.routing`: attaches our router losses, then routes as Megatron does."""
        rows = self.registry.rows_for(self)
        self._rows = rows
        settings = self.registry.losses
        if settings is not None and rows is not None and rows.aux_weights is not None:
            logits = self._attach_losses(logits, rows.aux_weights, settings)
        return self._route(logits, *args, **kwargs)

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Called by Megatron in place of its top-k. Returns (scores at the chosen ids [t, k], the ids int64 [t, k])."""
        if self.registry.native_topk is None:
            values, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values, native = self.registry.native_topk(scores, topk)
        rows = self._rows
        if rows is None:
            return values, native
        chosen = native
        if rows.routes is not None:
            wanted = rows.routes[self.layer]
            if wanted.shape != native.shape:
                raise RouteError(
                    "a micro-batch's routes do not fit the router's input",
                    field=f"layer {self.layer}",
                    found=tuple(wanted.shape),
                    expected=tuple(native.shape),
                )
            chosen = torch.where(wanted < 0, native, wanted)
            values = scores.gather(1, chosen)
        if self.registry.in_forward:
            self._count(scores.detach(), native, chosen, rows)
        return values, chosen

    def _count(self, scores, native, chosen, rows: RouterRows) -> None:
        real = rows.real
        if rows.routes is None:
            self.load += torch.bincount(chosen[real].flatten(), minlength=len(self.load)).to(self.load)
        else:
            known = (rows.routes[self.layer][:, 0] >= 0) & real
            same = (chosen.unsqueeze(2) == native.unsqueeze(1)).any(2).sum(1)
            sums = torch.stack((torch.where(known, same, 0), known * chosen.shape[1], real & ~known, real)).sum(1)
            self.agreed += sums[:2]
            self.missing += sums[2:]
        if self.registry.record:
            self.recorded = chosen
            top = scores.topk(chosen.shape[1] + 1, dim=1).values if chosen.shape[1] < scores.shape[1] else None
            if top is not None and real.any():
                self.margin = torch.minimum(self.margin, (top[:, -2] - top[:, -1])[real].min())

    def _attach_losses(self, logits, weights: torch.Tensor, settings: RouterLosses) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).float()
        aux = z = flat.new_zeros(())
        if settings.aux_coef:
            probs = self._score_distribution(flat)
            share = settings.frequencies[self.layer].to(probs) * probs.shape[1]
            aux = (weights[:, None] * probs * share).sum()
        if settings.z_coef:
            z = (weights * flat.logsumexp(-1).square()).sum()
        if self.registry.in_forward:
            self.losses += torch.stack((aux.detach(), z.detach())).to(self.losses)
        return _AttachLoss.apply(logits, settings.aux_coef * aux + settings.z_coef * z)

    def _score_distribution(self, logits: torch.Tensor) -> torch.Tensor:
        if self.router.score_function == "sigmoid":
            scores = logits.sigmoid()
            return scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return logits.softmax(-1)


class _AttachLoss(torch.autograd.Function):
    """Adds a scalar to the loss at this point of the graph: identity in forward, gradient 1 to the scalar in
    backward."""

    @staticmethod
    def forward(ctx, carrier, loss):
        ctx.save_for_backward(loss)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.saved_tensors[0])


class RouteRegistry:
    """All routers of one live model (its chunks on this rank), and the micro-batch being computed.

    Args:
        chunks: unwrapped model chunks of this rank.
        native_topk: the model's own top-k where Megatron's differs; None: Megatron's.
    """

    def __init__(self, chunks: list[GPTModel], native_topk: TopK | None = None) -> None:
        self.native_topk = native_topk
        self.handles: list[RouterHandle] = []
        self._of_chunk: list[list[RouterHandle]] = []
        for chunk in chunks:
            mine = [self._handle(layer) for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
            self._of_chunk.append(mine)
            self.handles += mine
        self.training = self.record = False
        self.losses: RouterLosses | None = None
        self._current: RouterRows | None = None
        self._micro_batches = [0] * len(chunks)
        self._recomputed = 0

    def _handle(self, layer: TransformerLayer) -> RouterHandle:
        router = layer.mlp.router
        refuse_unreplayable(router)
        return RouterHandle(router, layer.layer_number - 1, self)

    @property
    def in_forward(self) -> bool:
        """Whether a router call now is a forward of ours; outside it is a recompute."""
        return self._current is not None

    @property
    def layers(self) -> list[int]:
        """0-based decoder layers of this rank's routers."""
        return [handle.layer for handle in self.handles]

    @contextlib.contextmanager
    def step(self, *, training: bool, losses: RouterLosses | None = None, record: bool = False):
        """Around one forward(-backward) over all micro-batches; checks on leaving that every row was consumed.

        Raises:
            RouteError: rows left over, or a router called more or less often than its micro-batches.
        """
        for handle in self.handles:
            handle.reset_counts()
            handle.pending.clear()
            handle.calls = 0
        self._micro_batches = [0] * len(self._of_chunk)
        self._recomputed = 0
        self.training, self.losses, self.record = training, losses, record
        try:
            yield self
            self._check_consumed()
        finally:
            self._current, self.losses, self.training, self.record = None, None, False, False

    @contextlib.contextmanager
    def forward(self, chunk: int, rows: RouterRows):
        """Around one micro-batch's forward through one model chunk."""
        self._micro_batches[chunk] += 1
        self._current = rows
        try:
            yield
        finally:
            self._current = None

    def rows_for(self, handle: RouterHandle) -> RouterRows | None:
        """The rows of this call of `handle`: the current micro-batch's in forward, the oldest pending one's in
        recompute."""
        handle.calls += 1
        if self._current is not None:
            if self.training and not torch.is_grad_enabled():
                handle.pending.append(self._current)
            return self._current
        if not self.training:
            return None
        if not handle.pending:
            raise RouteError("a router was recomputed without a forward of ours", field=f"layer {handle.layer}")
        self._recomputed += 1
        return handle.pending.popleft()

    @property
    def consumed(self) -> tuple[int, int]:
        """(router calls of the last step, of which recomputes), summed over this rank's layers."""
        return sum(handle.calls for handle in self.handles), self._recomputed

    def _check_consumed(self) -> None:
        for chunk, handles in enumerate(self._of_chunk):
            micro_batches = self._micro_batches[chunk]
            for handle in handles:
                if handle.pending:
                    raise RouteError(
                        "recorded routes were not consumed",
                        field=f"layer {handle.layer}",
                        found=len(handle.pending),
                        expected=0,
                    )
                if handle.calls not in (micro_batches, 2 * micro_batches if self.training else micro_batches):
                    raise RouteError(
                        "a router was not called once per micro-batch (and once per recompute)",
                        field=f"layer {handle.layer}",
                        found=handle.calls,
                        expected=f"{micro_batches} or {2 * micro_batches}",
                    )


def group_limited(groups: Groups) -> TopK:
    """Top-k inside the best groups of experts (arXiv 2405.04434 §2.1.2; arXiv 2412.19437 §2.1.2).

    A group scores the sum of its `best` highest experts, a number of the model's; Megatron's group-limited top-k sums
    the k // chosen highest instead.
    """

    def topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = scores.unflatten(1, (groups.count, -1))
        ranking = grouped.topk(groups.best, 2).values.sum(2)
        used = torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ranking.topk(groups.chosen, 1).indices, True)
        return torch.where(used[:, :, None], grouped, -torch.inf).flatten(1).topk(k, 1)

    return topk


def refuse_unreplayable(router: torch.nn.Module) -> None:
    """Refuse, when the model is built, a router whose routing cannot be replayed.

    Raises:
        ConfigError: names the router setting and what to change.
    """
    if not isinstance(router, TopKRouter):
        raise ConfigError("this router's top-k cannot be replaced", found=type(router).__name__, expected="TopKRouter")
    config = router.config
    refused = {
        "moe_router_fusion": config.moe_router_fusion,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type not in ("none", ["none"]),
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": config.moe_input_jitter_eps is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
        "overlap_moe_expert_parallel_comm": getattr(config, "overlap_moe_expert_parallel_comm", False),
        "cuda_graph_impl": getattr(config, "cuda_graph_impl", "none") != "none",
    }
    for name, on in refused.items():
        if on:
            raise ConfigError(
                "routing cannot be replayed with this setting", found=f"{name}={getattr(config, name)}", setting=name
            )
