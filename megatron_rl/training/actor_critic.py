"""The live parts of a run on this rank: actor with optimizer and anchor, critic with optimizer, reference."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from megatron_rl.algorithm.controllers import Controllers
from megatron_rl.backend import offload, platform
from megatron_rl.backend.anchor import Anchor, Reference
from megatron_rl.backend.model import Role, build_model, transformer_config
from megatron_rl.backend.optimizer import Optimizer, build_optimizer
from megatron_rl.backend.topology import Topology
from megatron_rl.backend.weights import import_hf
from megatron_rl.batching import CostModel
from megatron_rl.config import OptimizerConfig, RunConfig
from megatron_rl.hf.config import HFModelConfig, read_hf_config
from megatron_rl.methods.anchors import EWMAAnchor


@dataclass
class ActorCritic:
    """Actor and critic on the same ranks, in one layout; group methods have no critic."""

    config: RunConfig
    topology: Topology
    actor: Optimizer
    critic: Optimizer | None
    anchor: Anchor | None
    reference: Reference | None
    version: int = 0
    """Weight version: completed policy steps published so far are at most this."""
    controllers: Controllers = field(init=False)
    """What the run steers by itself."""

    def __post_init__(self) -> None:
        self.controllers = Controllers(self.config.algorithm)

    @property
    def names(self) -> tuple[str, ...]:
        """The models there are: `actor`, and `critic` where there is one."""
        return ("actor",) if self.critic is None else ("actor", "critic")

    def on_device(self, name: str):
        """Context around the updates of `actor` or `critic`: its gradients and optimizer states are on the device."""
        optimizer, anchor = self._parts(name)
        if optimizer is None:
            return contextlib.nullcontext()
        return offload.on_device(optimizer, anchor, enabled=self.topology.config.phase_offload)

    def release_all(self) -> None:
        """Move what no phase needs yet off the device, where phases are to be offloaded."""
        if self.topology.config.phase_offload:
            for name in self.names:
                optimizer, anchor = self._parts(name)
                if optimizer is not None:
                    offload.release(optimizer, anchor)

    def _parts(self, name: str) -> tuple[Optimizer | None, Anchor | None]:
        return (self.actor, self.anchor) if name == "actor" else (self.critic, None)

    @property
    def cost(self) -> CostModel:
        """What data ranks are balanced by."""
        hf = self.actor.model.hf
        return CostModel.for_model(
            hidden=hf.hidden_size,
            heads=hf.num_heads,
            kv_heads=hf.num_kv_heads,
            head_dim=hf.head_dim,
            active_ffn=hf.topk * hf.moe_ffn_size if hf.moe_layers else hf.ffn_size,
        )


def build_actor_critic(config: RunConfig, topology: Topology) -> ActorCritic:
    """Build, import and wrap actor and critic.

    Raises:
        ConfigError, CheckpointError: the model does not fit the layout, or the checkpoint does not fit the model.
    """
    actor = _build(config, topology, config.model.path, "policy", config.optimizer)
    algorithm, critic = config.algorithm, None
    if algorithm.needs_critic:
        path = config.model.critic_path or config.model.path
        critic = _build(config, topology, path, "value", config.critic_optimizer)
    return ActorCritic(
        config=config,
        topology=topology,
        actor=actor,
        critic=critic,
        anchor=Anchor(actor, algorithm.anchor.decay) if isinstance(algorithm.anchor, EWMAAnchor) else None,
        reference=Reference(actor) if algorithm.needs_reference else None,
    )


def _build(config: RunConfig, topology: Topology, path: str, role: Role, optimizer: OptimizerConfig) -> Optimizer:
    source = read_hf_config(path, mtp=config.model.mtp)
    model = build_model(
        _with_head(source, role),
        transformer_config(source, topology.config, config.performance, platform.dtype(config.model.dtype)),
        topology,
        role,
        vocab_multiple=config.model.vocab_multiple,
    )
    import_hf(model, path, source)
    built = build_optimizer(model, optimizer)
    # Main weights were copied from parameters before the import filled them, or alias them: read them again.
    built.megatron.reload_model_params()
    return built


def _with_head(source: HFModelConfig, role: Role) -> HFModelConfig:
    return source.as_critic() if role == "value" else source
