"""Log-probs and entropies over the vocabulary-parallel output layer, and values of the critic, read at decisions only.

The output layer runs on the hidden states that a decision is read from, in chunks, and float32 logits of one chunk
exist at a time, in forward and again in backward. Padding rows of the vocabulary never get probability.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `labels` and entropies of softmax(logits / temperature).

    Args:
        hidden: [n, h] final hidden states at the positions that predict the labels, the same on every rank of `group`.
        weight: [V/tp, h] this rank's rows of the output layer.
        labels: int64 [n] token ids.
        temperature: divides the logits.
        vocab_size: V without padding.
        group: tensor-parallel group.
        chunk: rows whose logits exist at one time.

    Returns:
        log-probs and entropies, float32 [n], nats. The gradient with respect to `hidden` is this rank's part: sum it
        over `group` (a sequence-parallel gather does).
    """
    return _VocabParallelLogProbs.apply(hidden, weight, labels, temperature, vocab_size, group, chunk)


def _chunk_logits(hidden, weight, temperature, first, vocab_size):
    logits = (hidden @ weight.t()).float() / temperature
    padding = first + weight.shape[0] - vocab_size
    if padding > 0:
        logits[:, max(weight.shape[0] - padding, 0) :] = -torch.inf
    return logits


def _reduce(tensor, group, op=dist.ReduceOp.SUM):
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _log_normaliser(logits, group):
    top = _reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
    return top + _reduce((logits - top[:, None]).exp().sum(-1), group).log()


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, vocab_size, group, chunk):
        first = group.rank() * weight.shape[0]
        local = labels - first
        mine = (local >= 0) & (local < weight.shape[0])
        rows = local.clamp(0, weight.shape[0] - 1)
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for piece in range(0, len(labels), chunk):
            s = slice(piece, piece + chunk)
            logits = _chunk_logits(hidden[s], weight, temperature, first, vocab_size)
            normaliser[s] = _log_normaliser(logits, group)
            picked = torch.where(mine[s], logits.gather(1, rows[s, None])[:, 0], 0.0)
            logp = logits - normaliser[s, None]
            expected = torch.where(logp > -torch.inf, logp.exp() * logp, 0.0).sum(-1)
            picked, expected = _reduce(torch.stack((picked, expected)), group)
            logprobs[s], entropy[s] = picked - normaliser[s], -expected
        ctx.save_for_backward(hidden, weight, rows, mine, normaliser, entropy)
        ctx.settings = (temperature, vocab_size, first, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, rows, mine, normaliser, entropy = ctx.saved_tensors
        temperature, vocab_size, first, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for piece in range(0, len(rows), chunk):
            s = slice(piece, piece + chunk)
            logp = _chunk_logits(hidden[s], weight, temperature, first, vocab_size) - normaliser[s, None]
            probs = logp.exp()
            spread = torch.where(logp > -torch.inf, probs * (logp + entropy[s, None]), 0.0)
            grad = -grad_logprobs[s, None] * probs - grad_entropy[s, None] * spread
            grad.scatter_add_(1, rows[s, None], torch.where(mine[s], grad_logprobs[s], 0.0)[:, None])
            grad = (grad / temperature).to(weight.dtype)
            grad_hidden[s] = grad @ weight
            grad_weight += grad.t() @ hidden[s]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class KeepHidden(torch.nn.Module):
    """Stands in the output layer's place and keeps its weight, but returns the hidden states.

    Log-probs are then read at decisions only. The parameter keeps the name `output_layer.weight`, so checkpoints, tied
    embeddings and conversion see the model they expect.
    """

    def __init__(self, output_layer: torch.nn.Module) -> None:
        super().__init__()
        self.weight = output_layer.weight
        self.sequence_parallel = output_layer.sequence_parallel
        self._plain: list[Any] = [output_layer]

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        """hidden [s/tp, 1, h] → the same, with the (None) bias Megatron expects."""
        return hidden, None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The replaced layer's shards: its parameter is ours."""
        return self._plain[0].sharded_state_dict(prefix, sharded_offsets, metadata)

    def set_extra_state(self, state):
        """It has no state beyond its parameter: what a checkpoint holds of it is passed over."""


class ValueHead(torch.nn.Module):
    """Scalar head of the critic on the last stage: value = ⟨w, hidden⟩, float32.

    The weight [1, h] is replicated over tensor-parallel ranks, each seeing its sequence shard: it is marked
    `sequence_parallel` exactly when sequence parallelism is on, so that Megatron sums its gradient over them.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, sequence_parallel: bool, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        if sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        """hidden [s/tp, 1, h] → values float32 [s/tp, 1, 1]."""
        return (hidden.float() * self.weight.float()).sum(-1, keepdim=True), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Replicated over tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets)
