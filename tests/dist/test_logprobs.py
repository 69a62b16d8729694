"""Vocabulary-parallel log-probs and entropies against plain log-softmax, on one and two tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl.backend.logprobs import vocab_parallel_logprobs

VOCAB, PADDED, HIDDEN, ROWS = 13, 16, 6, 9


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, whole padded weight, labels over the whole vocabulary, and two weights per row for the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    # Padding rows would win every softmax if they counted.
    weight[VOCAB:] = 50.0
    labels = torch.tensor([0, 12, 7, 8, 3, 3, 11, 1, 5])
    return hidden.to(dtype), weight.to(dtype), labels, torch.randn(2, ROWS, generator=generator)


def sharded(temperature: float, chunk: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Readings and whole gradients from this rank's rows of the output layer."""
    hidden, weight, labels, weights = inputs(dtype)
    rows = PADDED // dist.get_world_size()
    mine = weight[dist.get_rank() * rows : (dist.get_rank() + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    settings = dict(temperature=temperature, vocab_size=VOCAB, group=dist.group.WORLD, chunk=chunk)
    logprobs, entropy = vocab_parallel_logprobs(hidden, mine, labels, **settings)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    dist.all_reduce(hidden.grad)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.grad)
    return dict(logprobs=logprobs.detach(), entropy=entropy.detach(), hidden=hidden.grad, weight=torch.cat(parts))


def plain(temperature: float) -> dict[str, torch.Tensor]:
    """The same in float64 over the real vocabulary."""
    hidden, weight, labels, weights = (x.double() if x.is_floating_point() else x for x in inputs())
    weight, hidden = weight.requires_grad_(), hidden.requires_grad_()
    logp = (hidden @ weight[:VOCAB].T / temperature).log_softmax(-1)
    logprobs, entropy = logp[torch.arange(ROWS), labels], -(logp.exp() * logp).sum(-1)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    return dict(logprobs=logprobs.detach(), entropy=entropy.detach(), hidden=hidden.grad, weight=weight.grad)


@pytest.mark.parametrize("ranks_used", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 100), (0.7, 1), (1.6, 4)])
def test_equals_plain_softmax(ranks, ranks_used: int, temperature: float, chunk: int) -> None:
    expected = plain(temperature)
    for found in ranks.run(sharded, ranks_used, temperature, chunk):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.all(found["weight"][VOCAB:] == 0)


def test_bfloat16_weights_give_float32_readings(ranks) -> None:
    expected, (found, _) = plain(1.0), ranks.run(sharded, 2, 1.0, 4, torch.bfloat16)
    assert found["logprobs"].dtype == torch.float32 and found["hidden"].dtype == torch.bfloat16
    torch.testing.assert_close(found["logprobs"].double(), expected["logprobs"], rtol=0.03, atol=0.05)


def no_rows() -> tuple[int, float]:
    """A rank that reads nothing still takes part."""
    _, weight, _, _ = inputs()
    weight.requires_grad_()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    settings = dict(temperature=1.0, vocab_size=VOCAB, group=dist.group.WORLD, chunk=4)
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), **settings)
    (logprobs.sum() + entropy.sum()).backward()
    return len(logprobs), float(weight.grad.abs().sum())


def test_no_decision_gives_zero_gradients(ranks) -> None:
    assert ranks.run(no_rows, 1) == [(0, 0.0)]
