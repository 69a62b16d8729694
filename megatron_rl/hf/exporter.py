"""Megatron parameters → HF tensors. No collectives: the caller gathers the shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.inventory import hf_tensors, is_stored, rule_for
from megatron_rl.hf.tensor_parallel import join, unmerge


def join_shards(canonical: str, shards: Sequence[Tensor], config: HFModelConfig) -> Tensor:
    """Tensor-parallel shards of one parameter, in rank order → the whole parameter, vocabulary still padded.

    For experts these are the shards of the expert-tensor-parallel group. The result may be one of the shards.

    Raises:
        CheckpointError: the family has no such parameter, or replicas (norms, routers) are not bit-equal.
    """
    try:
        split = rule_for(config, canonical).split
        # One shard is the whole: nothing is copied.
        return shards[0] if len(shards) == 1 else join(split, shards)
    except CheckpointError as error:
        if error.field:
            raise
        raise CheckpointError(error.what, field=canonical, found=error.found, expected=error.expected) from None


def split_full(
    canonical: str, full: Tensor, config: HFModelConfig, *, layer: int | None = None, expert: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """A whole parameter → (HF name, tensor) pairs, vocabulary trimmed; nothing for a tied output layer.

    Names are per expert also where the family stores stacks only: `ExpertStacks` puts those together.

    Args:
        full: the joined parameter; results may be views of it.
        layer, expert: global and 0-based, None where the parameter has none.

    Raises:
        CheckpointError: the family has no such parameter, or its shape is not the model's.
    """
    rule = rule_for(config, canonical)
    if not is_stored(config, rule):
        return
    tensors = hf_tensors(config, rule, layer, expert)
    rows = [tensor.shape[0] for tensor in tensors]
    if rule.split == "vocab":
        full = full[: rows[0]]
    expected = (sum(rows), *tensors[0].shape[1:])
    if tuple(full.shape) != expected:
        raise CheckpointError(
            "a whole parameter has another shape than the model",
            field=canonical,
            found=tuple(full.shape),
            expected=expected,
        )
    parts = unmerge(full, rows, config.num_kv_heads if rule.split == "qkv" else 1)
    yield from zip((tensor.name for tensor in tensors), parts, strict=True)


class ExpertStacks:
    """Puts together the experts of families that store a layer's experts as one tensor; passes on all others.

    Experts of a parameter come in any order, one stack being open at a time as long as parameters come one by one.
    """

    def __init__(self, config: HFModelConfig) -> None:
        self._config = config
        self._open: dict[str, Tensor] = {}
        self._parts: Counter[str] = Counter()

    def split(
        self, canonical: str, full: Tensor, *, layer: int | None = None, expert: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """As `split_full`, under the names exports write: a stack comes with the last of its parts."""
        pairs = split_full(canonical, full, self._config, layer=layer, expert=expert)
        rule = rule_for(self._config, canonical)
        if expert is None or not all(source.stacked and source.stacked.only for source in rule.sources):
            yield from pairs
            return
        tensors = hf_tensors(self._config, rule, layer, expert)
        stacks = [tensor.stacked for tensor in tensors if tensor.stacked is not None]
        for stack, (_, piece) in zip(stacks, pairs, strict=True):
            name = stack.name
            if name not in self._open:
                self._open[name] = piece.new_empty(stack.shape)
            stack.put(self._open[name], piece)
            self._parts[name] += 1
            if self._parts[name] == self._config.num_experts * stack.layout.parts:
                del self._parts[name]
                yield name, self._open.pop(name)
