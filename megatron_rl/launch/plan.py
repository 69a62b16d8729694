"""What a run would look like on a cluster, before anything is submitted: ranks, groups, parameters, memory.

Nothing is built and no weights are read; only the shape of the model (`config.json`) is, and a run without one is
planned without parameters and memory. Ranks are placed as SLURM places them under `--distribution=block`: rank r on
node r // GPUs a node. Megatron's order is tensor, context, (expert,) data, pipeline, so a tensor, context or expert
group is a run of consecutive ranks of one stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.backend.topology import check_layout, check_model_fits
from megatron_rl.config import ParallelConfig, RunConfig
from megatron_rl.hf.config import HFModelConfig, read_hf_config
from megatron_rl.hf.inventory import model_parameters

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """What the ranks run on."""

    nodes: int
    gpus_per_node: int
    segment: int = 1
    """Consecutive nodes joined by NVLink (SLURM's `--segment`): 1 where a node is an island."""

    @property
    def world(self) -> int:
        """Ranks: one a GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def domain(self) -> int:
        """Consecutive ranks joined by NVLink."""
        return self.gpus_per_node * self.segment


@dataclass(frozen=True)
class RoleMemory:
    """Bytes on the fullest GPU that one model takes. Activations, buffers of NCCL and fragmentation come on top."""

    parameters: int
    """Parameters of the whole model, unsharded."""
    local_parameters: int
    """Parameters on that GPU."""
    weights: int
    gradients: int
    """Megatron's float32 gradient buffer."""
    optimizer: int
    """Main weights, two moments and, of an actor with an EWMA anchor, the average; sharded over data ranks."""

    @property
    def working(self) -> int:
        """What phase offload takes off the GPU while the other model is updated."""
        return self.gradients + self.optimizer


@dataclass(frozen=True)
class LaunchPlan:
    """Written by `plan_launch`, shown before submission."""

    cluster: Cluster
    config: ParallelConfig
    data: int
    """Data replicas."""
    inside: dict[str, bool]
    """Kind of group → whether every such group lies inside one NVLink domain."""
    actor: RoleMemory | None
    """None: the model's shape is not known here."""
    critic: RoleMemory | None
    """None too where the advantage needs no critic."""
    warnings: tuple[str, ...]

    @property
    def bytes_per_gpu(self) -> int | None:
        """Weights, gradients and optimizer states of all models on the fullest GPU; None: shape not known."""
        if self.actor is None:
            return None
        roles = [role for role in (self.actor, self.critic) if role is not None]
        working = [role.working for role in roles]
        held = max(working) if self.config.phase_offload else sum(working)
        return sum(role.weights for role in roles) + held


def plan_launch(config: RunConfig, cluster: Cluster, shape: HFModelConfig | None) -> LaunchPlan:
    """Check a layout against a cluster and a model, and estimate what it holds.

    Args:
        config: the run.
        cluster: where it would run.
        shape: the policy's; None: not known here.

    Raises:
        ConfigError: the world does not divide into the layout, or the layout does not divide the model; names the
            setting.
    """
    layout = config.parallel
    check_layout(layout, cluster.world)
    if shape is not None:
        check_model_fits(
            layout,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            experts=shape.num_experts,
            layers=shape.num_layers,
            ffn=shape.moe_ffn_size,
        )
    inside = groups_inside(layout, cluster)
    actor = critic = None
    if shape is not None:
        actor = role_memory(config, cluster.world, shape)
        if config.algorithm.needs_critic:
            critic = role_memory(config, cluster.world, shape.as_critic())
    data = cluster.world // layout.model_ranks
    return LaunchPlan(cluster, layout, data, inside, actor, critic, _warnings(config, cluster, inside, data))


def find_shape(config: RunConfig, file: str | Path) -> HFModelConfig | None:
    """Shape of the policy: of the checkpoint if it is here, else of `config.json` beside the run's YAML, else None."""
    for place in (Path(config.model.path or "."), Path(file).parent):
        if (place / "config.json").is_file():
            return read_hf_config(place)
    return None


def groups_inside(layout: ParallelConfig, cluster: Cluster) -> dict[str, bool]:
    """Kind of group → whether no group of that kind lies across NVLink domains.

    `expert` stands for the ranks that exchange tokens: EP and expert-TP together.
    """
    # (members, distance between them)
    groups = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "expert": (layout.expert * layout.expert_tensor, 1),
    }
    return {name: _all_inside(members, step, cluster) for name, (members, step) in groups.items()}


def _all_inside(members: int, step: int, cluster: Cluster) -> bool:
    firsts = (base + offset for base in range(0, cluster.world, members * step) for offset in range(step))
    return all(rank // cluster.domain == (rank + step * (members - 1)) // cluster.domain for rank in firsts)


def _warnings(config: RunConfig, cluster: Cluster, inside: dict[str, bool], data: int) -> tuple[str, ...]:
    layout, found = config.parallel, []
    costs = {
        "tensor": (layout.tensor, "every layer reduces activations", "parallel.tensor"),
        "context": (layout.context, "every attention exchanges keys and values", "parallel.context"),
        "expert": (layout.expert * layout.expert_tensor, "every MoE layer exchanges tokens", "parallel.expert"),
    }
    for kind, (span, cost, setting) in costs.items():
        if not inside[kind]:
            found.append(
                f"{kind} groups of {span} ranks lie across NVLink domains of {cluster.domain} GPUs: {cost} over the "
                f"network. Change: {setting}, or --segment where NVLink joins several nodes"
            )
    if config.rollout.episodes < data:
        found.append(
            f"{config.rollout.episodes} episodes for {data} data replicas: some have nothing to train on. "
            "Change: rollout.episodes, or fewer nodes"
        )
    if cluster.nodes % cluster.segment:
        found.append(f"{cluster.nodes} nodes are no multiple of --segment {cluster.segment}: SLURM will refuse them")
    return tuple(found)


def role_memory(config: RunConfig, world: int, shape: HFModelConfig) -> RoleMemory:
    """Parameters and bytes of one model on its fullest GPU, from its shape and the layout.

    Bytes a parameter: weights 2 (bfloat16) or 4; gradients 4; optimizer 8 for the moments, 4 for main weights apart
    from bfloat16 ones, 4 for the EWMA. Optimizer states are divided over the ranks that hold the same parameter, which
    are fewer for experts: world / (PP·EP·ETP) instead of world / (PP·TP).
    """
    layout = config.parallel
    dense, expert = max(_stage_parameters(layout, shape), key=sum)
    half = config.model.dtype == "bfloat16"
    ewma = config.algorithm.anchor.name == "ewma" and shape.head == "lm"
    holders = world // layout.pipeline
    shards = (holders // layout.tensor, holders // (layout.expert * layout.expert_tensor))
    if not layout.distributed_optimizer:
        shards = (1, 1)
    return RoleMemory(
        parameters=sum(_stage_parameters(ParallelConfig(), shape)[0]),
        local_parameters=dense + expert,
        weights=(2 if half else 4) * (dense + expert),
        gradients=4 * (dense + expert),
        optimizer=(8 + 4 * half + 4 * ewma) * (dense // shards[0] + expert // shards[1]),
    )


def _stage_parameters(layout: ParallelConfig, shape: HFModelConfig) -> list[tuple[int, int]]:
    """(dense, expert) parameters of one rank of each stage. A `pipeline_layout` is taken for even stages."""
    stage_of = [stage for stage, layers in enumerate(_stage_layers(layout, shape.num_layers)) for _ in range(layers)]
    dense, expert = [0] * layout.pipeline, [0] * layout.pipeline
    for rule, layer, _ in model_parameters(shape):
        if rule.tied_to and shape.tied_embeddings and layout.pipeline == 1:
            continue
        size = sum(math.prod(shape.size(axis) for axis in source.shape) for source in rule.sources)
        if layer is not None:
            stage = stage_of[layer]
        else:
            stage = 0 if rule.canonical.startswith("embedding") else layout.pipeline - 1
        if rule.scope == "expert":
            expert[stage] += size
        else:
            dense[stage] += size if rule.split == "replicated" else size // layout.tensor
    share = layout.expert * layout.expert_tensor
    return [(d, e // share) for d, e in zip(dense, expert, strict=True)]


def _stage_layers(layout: ParallelConfig, layers: int) -> list[int]:
    """Layers of each stage."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    middle = layout.pipeline - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    even = [rest // middle + (stage < rest % middle) for stage in range(middle)] if middle else []
    return [*([first] if first is not None else []), *even, *([last] if last is not None else [])]


def describe(plan: LaunchPlan) -> list[str]:
    """The plan in lines for a terminal."""
    cluster, layout = plan.cluster, plan.config
    sizes = {
        "TP": layout.tensor, "PP": layout.pipeline, "VPP": layout.virtual_pipeline, "CP": layout.context,
        "EP": layout.expert, "ETP": layout.expert_tensor, "DP": plan.data,
    }  # fmt: skip
    shown = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP")
    lines = [
        f"ranks    {cluster.world}: {cluster.nodes} nodes of {cluster.gpus_per_node}, one rank a GPU",
        f"layout   {shown}",
        "groups   "
        + ", ".join(f"{name} {'inside' if kept else 'ACROSS'} NVLink domains" for name, kept in plan.inside.items()),
    ]
    for name, role in (("actor", plan.actor), ("critic", plan.critic)):
        if role is not None:
            lines.append(
                f"{name:8} {role.parameters / 1e9:.2f} B parameters, {role.local_parameters / 1e9:.3f} B on the "
                f"fullest GPU: weights {_gib(role.weights)}, gradients {_gib(role.gradients)}, "
                f"optimizer {_gib(role.optimizer)}"
            )
    if plan.bytes_per_gpu is None:
        lines.append("memory   not estimated: no config.json at model.path or beside the YAML")
    else:
        several = plan.critic is not None
        held = ("one model's " if layout.phase_offload else "both models' ") if several else ""
        lines.append(
            f"memory   {_gib(plan.bytes_per_gpu)} a GPU with {held}gradients and optimizer; activations come on top"
        )
    return lines + [f"warning  {text}" for text in plan.warnings]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
