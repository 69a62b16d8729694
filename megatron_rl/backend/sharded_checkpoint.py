"""Every tensor a run trains, in one Megatron distributed checkpoint (`megatron.core.dist_checkpointing`) of any layout.

Stored are whole float32 tensors in the shape of the model's parameters, whatever the layout and the computation dtype:
main weights, both Adam moments, the EWMA anchor θ̄ and π_ref, under `<role>.<state>.<Megatron's key of the parameter>`,
where the role is `actor` or `critic`. Megatron's `sharded_state_dict` of the model says which part of a global tensor a
rank's parameter is. Main copies, which the distributed optimizer shards flat over data ranks, are gathered to one owner
a parameter; owners are spread over data ranks, so that each writes about its share. Loading is the reverse: the owner
reads and broadcasts. Hence no file depends on the layout or on whether the optimizer was distributed. The optimizer's
own `sharded_state_dict` has three states only, and its keys and its gathering differ between optimizer classes.

Model parameters are not stored beside their main weights: in float32 they are the same, in bfloat16 the rounded ones.

Invariants:

* bits survive: pieces are gathered by adding bit patterns to zeros, not floats;
* a state that the live run has and the checkpoint lacks is an error on every rank;
* states that only the checkpoint has are ignored: a run without an anchor may continue one with an anchor.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.backend import platform
from megatron_rl.backend.anchor import Anchor, Reference, copy_main_to_model
from megatron_rl.backend.checkpoint_reader import read_metadata
from megatron_rl.backend.optimizer import Optimizer
from megatron_rl.backend.parameters import main_copies
from megatron_rl.errors import CheckpointError

T = TypeVar("T")
NUMBERS = "states.json"
"""Beside Megatron's files: what is a number rather than a tensor, and which model it belongs to."""


@dataclass(frozen=True)
class ModelStates:
    """One model with every state of it that a checkpoint holds."""

    optimizer: Optimizer
    anchor: Anchor | None = None
    reference: Reference | None = None

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """State → this rank's pieces, float32, in the order of `anchor.main_weights`.

        Before the first step the moments are created, zero.
        """
        mains, first, second = [], [], []
        for part in self.optimizer.parts:
            part.init_state_fn(part.optimizer, part.config)
            for main, _ in main_copies(part):
                mains.append(main.detach())
                first.append(part.optimizer.state[main]["exp_avg"])
                second.append(part.optimizer.state[main]["exp_avg_sq"])
        states = {"weights": mains, "exp_avg": first, "exp_avg_sq": second}
        if self.anchor is not None:
            states["ewma"] = self.anchor.average
        if self.reference is not None:
            states["reference"] = self.reference.weights
        return states

    def numbers(self) -> dict[str, Any]:
        """Completed steps, Z of the anchor, and the shape of the model."""
        anchor = {} if self.anchor is None else {"z": self.anchor.z}
        return {
            "steps": self.optimizer.steps,
            **anchor,
            "model": json.loads(json.dumps(asdict(self.optimizer.model.hf))),
        }


def save_states(directory: str | Path, models: Mapping[str, ModelStates]) -> None:
    """Write all states into an existing, empty directory. Collective over the default process group.

    Args:
        directory: seen by all ranks.
        models: role (`actor`, `critic`) → states; roles become key prefixes.

    Raises:
        CheckpointError: on every rank, if any could not write or the file system has too little room.
    """
    directory = Path(directory)
    state = {}
    for role, model in models.items():
        tensors = model.tensors()
        for slot in _slots(model.optimizer):
            for kind, pieces in tensors.items():
                whole = _gather_to_owner(slot, None if slot.index is None else pieces[slot.index])
                if whole is not None:
                    state[f"{role}.{kind}.{slot.name}"] = slot.shard(f"{role}.{kind}", whole)
    _check_space(directory, sum(shard.data.nbytes for shard in state.values()))
    save = partial(dist_checkpointing.save, state, str(directory), _InProcessSave("torch_dist", 1))
    _guarded(save, directory, "could not be written")
    numbers = {role: model.numbers() for role, model in models.items()}
    on_first_rank(directory, lambda: (directory / NUMBERS).write_text(json.dumps(numbers, indent=1)))


def load_states(directory: str | Path, models: Mapping[str, ModelStates]) -> None:
    """Fill live optimizers, anchors and references, and the models from them. Collective; any layout.

    Args:
        directory: written by `save_states`.
        models: as built by the run; every state present here must be in the checkpoint.

    Raises:
        CheckpointError: on every rank; a state is missing, unreadable, or of another model. The live states may then be
            partly overwritten.
    """
    directory = Path(directory)
    # Megatron unpickles the metadata without asking what it names: nothing else may be in it by then.
    together(directory, lambda: read_metadata(directory))
    numbers = together(directory, lambda: _read_numbers(directory, models))
    slots = {role: list(_slots(model.optimizer)) for role, model in models.items()}
    states = {role: model.tensors() for role, model in models.items()}
    wanted = {
        f"{role}.{kind}.{slot.name}": slot.shard(f"{role}.{kind}", torch.zeros(slot.parameter.shape))
        for role in models
        for slot in slots[role]
        if slot.mine
        for kind in states[role]
    }
    together(directory, lambda: _check_keys(directory, wanted))
    read = _guarded(partial(dist_checkpointing.load, wanted, str(directory)), directory, "could not be read")
    for role, model in models.items():
        for slot in slots[role]:
            for kind, pieces in states[role].items():
                whole = _broadcast_from_owner(slot, read.get(f"{role}.{kind}.{slot.name}"))
                if slot.index is not None:
                    piece = pieces[slot.index]
                    piece.copy_(whole.flatten()[slot.span].view(piece.shape))
        _set_numbers(model, numbers[role])
        copy_main_to_model(model.optimizer)


def _check_space(directory: Path, needed: int) -> None:
    """Refuse before anything is written: a failure of rank 0 inside Megatron's save would leave the others waiting."""
    total = torch.tensor(needed, device=platform.device())
    dist.all_reduce(total)

    def check() -> None:
        free = shutil.disk_usage(directory).free
        if free < total:
            raise CheckpointError(
                "no room for a checkpoint",
                file=directory,
                found=f"{free / 1e9:.3f} GB free",
                expected=f"{total.item() / 1e9:.3f} GB",
                setting="output, or checkpoint.keep",
            )

    on_first_rank(directory, check)


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` format, written by this process.

    Megatron's own strategy spawns a manager and forks a writer even for a synchronous save: seconds of imports, a
    `__main__` guard needed in every script, and a hang where the writer is killed.
    """

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict, checkpoint_dir):
        by_key = defaultdict(list)
        for shard in nested_values(sharded_state_dict):
            if is_main_replica(shard.replica_id):
                # Objects are stored under their shard's own name (Megatron's common state, from 0.19 on, is one).
                by_key[shard.unique_key if isinstance(shard, ShardedObject) else shard.key].append(shard)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _read_numbers(directory: Path, models: Mapping[str, ModelStates]) -> dict[str, Any]:
    numbers = json.loads((directory / NUMBERS).read_text())
    for role, model in models.items():
        if role not in numbers:
            raise CheckpointError("state missing", file=directory, field=role, found=sorted(numbers), expected=role)
        if model.anchor is not None and "z" not in numbers[role]:
            raise CheckpointError(
                "the checkpoint has no EWMA anchor",
                file=directory,
                field=f"{role}.z",
                expected="Z and averaged weights",
                setting="algorithm.anchor, or checkpoint.resume=false to start afresh",
            )
        saved, live = numbers[role]["model"], model.numbers()["model"]
        for key, expected in live.items():
            if saved.get(key) != expected:
                raise CheckpointError(
                    "the checkpoint is of another model",
                    file=directory,
                    field=f"{role}.{key}",
                    found=saved.get(key),
                    expected=expected,
                    setting="model.path",
                )
    return numbers


def _check_keys(directory: Path, wanted: Mapping[str, ShardedTensor | ShardedTensorFactory]) -> None:
    stored = {tensor.key for tensor in dist_checkpointing.load_tensors_metadata(str(directory)).values()}
    missing = sorted({shard.key for shard in wanted.values()} - stored)
    if missing:
        raise CheckpointError(
            "state missing",
            file=directory,
            field=missing[0],
            found=f"{len(missing)} of {len(wanted)} tensors missing",
            expected="every state of the run",
            setting="the setting that added this state, or checkpoint.resume=false to start afresh",
        )


def _set_numbers(model: ModelStates, numbers: Mapping[str, Any]) -> None:
    steps = model.optimizer.steps = numbers["steps"]
    for part in model.optimizer.parts:
        for group in part.optimizer.param_groups:
            group["step"] = steps
        # torch's own AdamW counts per tensor instead.
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(steps)
    if model.anchor is not None:
        model.anchor.z = numbers["z"]


@dataclass(frozen=True)
class _Slot:
    """One parameter of this rank, as the checkpoint sees it."""

    name: str
    """Unique on this rank."""
    parameter: torch.nn.Parameter
    described: ShardedTensor | ShardedTensorFactory
    """Which part of which global tensor the parameter is."""
    group: dist.ProcessGroup
    """Data ranks that share or replicate the main copy."""
    owner: int
    """Rank in `group` that writes and reads it."""
    index: int | None
    """Position in `main_weights`; None where this rank's shard of the optimizer has no element of it."""
    span: slice
    """This rank's elements of the flat parameter."""
    sharded: bool
    """Whether the main copy is sharded over `group`."""

    @property
    def mine(self) -> bool:
        """Whether this rank writes and reads it."""
        return self.group.rank() == self.owner

    def shard(self, prefix: str, data: torch.Tensor) -> ShardedTensor | ShardedTensorFactory:
        """The parameter's description with other data, float32 [shape of the parameter], under `<prefix>.<its key>`."""
        # The last number is the data rank: only the owner presents the tensor, so it is the main replica.
        replica = (*self.described.replica_id[:-1], 0)
        changes: dict[str, Any] = {"key": f"{prefix}.{self.described.key}", "data": data, "replica_id": replica}
        if isinstance(self.described, ShardedTensor):
            changes["dtype"] = data.dtype
        return replace(self.described, **changes)


def _slots(optimizer: Optimizer) -> Iterator[_Slot]:
    """Every parameter, in an order that all ranks of its data group share; owners have about as many elements each."""
    mains = _main_positions(optimizer)
    loads: dict[int, list[int]] = {}
    for number, chunk in enumerate(optimizer.model.bare):
        described = {
            id(shard.data): shard
            for shard in chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()
            if isinstance(shard, (ShardedTensor, ShardedTensorFactory))
        }
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in described or id(parameter) not in mains:
                raise CheckpointError(
                    "a parameter would not be saved", field=name, expected="optimized and in the state dict"
                )
            group = _data_group(optimizer, parameter)
            load = loads.setdefault(id(group), [0] * group.size())
            owner = load.index(min(load))
            load[owner] += parameter.numel()
            yield _Slot(f"{number}.{name}", parameter, described[id(parameter)], group, owner, **mains[id(parameter)])


def _data_group(optimizer: Optimizer, parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    if getattr(parameter, "allreduce", True):
        return optimizer.model.topology.dp_cp_group
    return mpu.get_expert_data_parallel_group()


def _main_positions(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """id(parameter) → index, span and sharded of its `_Slot`."""
    found: dict[int, dict[str, Any]] = {}
    index = 0
    for part in optimizer.parts:
        sharded = isinstance(part, DistributedOptimizer)
        if sharded:
            nothing = {"index": None, "span": slice(0), "sharded": True}
            found |= {id(parameter): nothing for buffer in part.buffers for parameter in buffer.param_index_map}
        for _, parameter in main_copies(part):
            span = slice(None)
            if sharded:
                held = part._get_model_param_range_map(parameter)["param"]
                span = slice(held.start, held.end)
            found[id(parameter)] = {"index": index, "span": span, "sharded": sharded}
            index += 1
    return found


def _gather_to_owner(slot: _Slot, piece: torch.Tensor | None) -> torch.Tensor | None:
    """The whole parameter-shaped tensor, float32 on the CPU, on its owner; None elsewhere."""
    if not slot.sharded or slot.group.size() == 1:
        if not slot.mine:
            return None
        assert piece is not None, "one rank alone holds the whole main copy"
        return piece.reshape(slot.parameter.shape).to("cpu", copy=True)
    bits = torch.zeros(slot.parameter.numel(), dtype=torch.int32, device=platform.device())
    if piece is not None:
        bits[slot.span] = piece.contiguous().view(torch.int32).to(bits.device)
    dist.reduce(bits, dist.get_global_rank(slot.group, slot.owner), group=slot.group)
    return bits.view(torch.float32).view(slot.parameter.shape).cpu() if slot.mine else None


def _broadcast_from_owner(slot: _Slot, whole: torch.Tensor | None) -> torch.Tensor:
    """What the owner read, on every rank of the slot's group."""
    if slot.mine:
        assert whole is not None, "the owner reads what it owns"
        tensor = whole.to(platform.device()).contiguous()
    else:
        tensor = torch.empty(slot.parameter.shape, device=platform.device())
    if slot.group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(slot.group, slot.owner), group=slot.group)
    return tensor


def together(file: str | Path, work: Callable[[], T]) -> T:
    """Run work without collectives on every rank; if it failed on any, all raise.

    Raises:
        CheckpointError: the first failing rank's, on every rank.
    """
    result, error = None, None
    try:
        result = work()
    except CheckpointError as failure:
        error = failure
    except (OSError, ValueError, KeyError, CheckpointingException) as failure:
        error = CheckpointError(f"checkpoint failed on rank {dist.get_rank()}", file=file, found=repr(failure))
    errors: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for found in errors:
        if found is not None:
            raise found
    return cast(T, result)


def on_first_rank(file: str | Path, work: Callable[[], Any]) -> None:
    """`together`, with work for rank 0 only."""
    together(file, work if dist.get_rank() == 0 else lambda: None)


def _guarded(work: Callable[[], T], directory: Path, what: str) -> T:
    """Run a collective of Megatron's, which tells all ranks of one that failed, and name the file in the error."""
    try:
        return work()
    except (CheckpointException, CheckpointingException, OSError, KeyError, RuntimeError) as failure:
        raise CheckpointError(f"checkpoint {what}", file=directory, found=repr(failure)) from failure
