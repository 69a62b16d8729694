"""Forward and backward over micro-batches through Megatron's schedules; routes are replayed, decisions alone read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_rl.backend.logprobs import vocab_parallel_logprobs
from megatron_rl.backend.micro_batch import MicroBatch
from megatron_rl.backend.model import Model
from megatron_rl.backend.replay import RouterLosses

LossFunction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(slots int64 [n], readings float32 [c, n]) → (loss, already weighted for the global sum; logged sums float64 [m])."""


@dataclass(frozen=True)
class Readout:
    """How readings are taken from a model's output.

    A policy gives two rows, log-prob and entropy; a critic one, the value.
    """

    temperature: float = 1.0
    """Divides the policy's logits; never touches values."""
    chunk: int = 4096
    """Decisions whose float32 logits exist at one time."""


def score(model: Model, micro_batches: list[MicroBatch], length: int, readout: Readout, *, record: bool = False):
    """Readings without gradients.

    Returns:
        (slots int64 [n], readings float32 [c, n]) of this rank; empty except on the last stage.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(slots, readings):
        found.append((slots, readings.detach()))
        return readings.sum() * 0, readings.new_zeros(0)

    with torch.no_grad():
        _run(model, micro_batches, length, readout, keep, training=False, record=record)
    rows = 2 if model.role == "policy" else 1
    if not found:
        device = micro_batches[0].tokens.device
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(rows, 0, device=device)
    return torch.cat([slots for slots, _ in found]), torch.cat([values for _, values in found], 1)


def train(
    model: Model,
    micro_batches: list[MicroBatch],
    length: int,
    readout: Readout,
    loss: LossFunction,
    losses: RouterLosses | None = None,
) -> torch.Tensor | None:
    """Accumulate gradients of Σ loss over micro-batches and reduce them over data ranks.

    Returns:
        The logged sums of this rank, float64 [m], on the last stage; None elsewhere.
    """
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    sums = _run(model, micro_batches, length, readout, loss, training=True, losses=losses)
    return torch.stack(sums).sum(0) if sums else None


def _run(model: Model, micro_batches, length, readout, loss, *, training, losses=None, record=False):
    interleaved = len(model.chunks) > 1
    iterators = [iter(micro_batches) for _ in model.chunks]
    index = {id(chunk): i for i, chunk in enumerate(model.chunks)}

    def forward_step(iterator, chunk, *_):
        batch: MicroBatch = next(iterator)
        with model.registry.forward(index[id(chunk)], batch.router):
            output = chunk(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                attention_mask=None,
                packed_seq_params=batch.attention,
            )
        return output, partial(_loss, model, batch, readout, loss)

    with model.registry.step(training=training, losses=losses, record=record):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=model.chunks if interleaved else model.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=1,
            forward_only=not training,
        )


def _loss(model: Model, batch: MicroBatch, readout: Readout, loss: LossFunction, output: torch.Tensor):
    readings = (
        read_policy(model, batch, readout, output) if model.role == "policy" else read_value(model, batch, output)
    )
    value, sums = loss(batch.slots, readings)
    # An all-padding micro-batch still runs backward, so that its collectives meet their peers'.
    value = value + output.sum() * 0
    # Three values: Megatron rescales the loss of a pair by context-parallel size over micro-batches.
    return value, torch.zeros((), dtype=torch.int, device=output.device), sums


def read_policy(model: Model, batch: MicroBatch, readout: Readout, hidden: torch.Tensor) -> torch.Tensor:
    """Log-probs and entropies, float32 [2, n], from the last stage's hidden states [1, s/tp, h]."""
    # Megatron's wrapper hands a bfloat16 model's output out in float32; the output layer is still bfloat16.
    hidden = hidden[0].to(model.output_weight().dtype)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=model.topology.tp_group)
    return torch.stack(
        vocab_parallel_logprobs(
            hidden[batch.read_at],
            model.output_weight(),
            batch.labels,
            temperature=readout.temperature,
            vocab_size=model.hf.vocab_size,
            group=model.topology.tp_group,
            chunk=readout.chunk,
        )
    )


def read_value(model: Model, batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values, float32 [1, n], from the value head's output [1, s/tp, 1]."""
    values = values[0]
    if model.config.sequence_parallel:
        # Every tensor-parallel rank forms the same loss: summing their gradients would count it TP times.
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=model.topology.tp_group
        )
    return values[batch.read_at].T
