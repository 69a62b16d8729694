"""Loss weights: what each rule averages, and independence of loss and gradient from the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.objectives import aggregation
from megatron_rl.objectives.segments import compact
from tests.unit.objectives.timelines import offsets_of

RULES = ("token_mean", "sequence_mean", "sequence_sum_mean", "prompt_mean", "constant")


def weights_of(rule, lengths, counts, prompt_sizes):
    return aggregation.sequence_weights(rule, lengths, counts, prompt_sizes=prompt_sizes, constant=100.0)


def slow_loss(rule, losses, lengths, prompts):
    """The mean each rule is named after, with Python lists."""
    rows = [(p, part) for p, part in zip(prompts, losses.split(lengths), strict=True) if len(part)]
    if not rows:
        return torch.zeros(()).double()
    if rule == "token_mean":
        return torch.cat([part for _, part in rows]).mean()
    if rule == "sequence_mean":
        return torch.stack([part.mean() for _, part in rows]).mean()
    if rule == "sequence_sum_mean":
        return torch.stack([part.sum() for _, part in rows]).mean()
    if rule == "constant":
        return torch.cat([part for _, part in rows]).sum() / 100
    by_prompt = {p: [part.mean() for q, part in rows if q == p] for p, _ in rows}
    return torch.stack([torch.stack(means).mean() for means in by_prompt.values()]).mean()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=6), st.sampled_from(RULES))
def test_rules_are_the_means_they_are_named_after(rows, rule):
    lengths, prompts = [n for n, _ in rows], [p for _, p in rows]
    losses = torch.randn(sum(lengths), dtype=torch.float64)
    tensor = torch.tensor(lengths)
    counts, sizes = aggregation.count(tensor, torch.tensor(prompts))
    offsets = offsets_of(lengths)
    w = aggregation.decision_weights(weights_of(rule, tensor, counts, sizes), offsets)
    found = aggregation.weighted_sum(losses, w.double())
    torch.testing.assert_close(found, slow_loss(rule, losses, lengths, prompts), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_loss_and_gradient_do_not_depend_on_the_split(rule):
    lengths, prompts = torch.tensor([3, 0, 10, 1, 5]), torch.tensor([4, 4, 2, 2, 9])
    counts, sizes = aggregation.count(lengths, prompts)
    per_sequence = weights_of(rule, lengths, counts, sizes)
    offsets = offsets_of(lengths.tolist())
    x = torch.randn(19, dtype=torch.float64, requires_grad=True)
    w = aggregation.decision_weights(per_sequence, offsets)
    aggregation.weighted_sum(x.square(), w).backward()
    y = x.detach().clone().requires_grad_()
    for order in ([4, 0], [1], [3, 2]):
        parts = [y[int(offsets[i]) : int(offsets[i + 1])] for i in order]
        local = offsets_of(len(p) for p in parts)
        local_w = aggregation.decision_weights(weights_of(rule, lengths[order], counts, sizes[order]), local)
        aggregation.weighted_sum(torch.cat(parts).square(), local_w).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=0)


def test_the_turn_critic_is_the_sequence_mean_over_turns():
    turns = torch.tensor([2, 0, 4])
    counts, _ = aggregation.count(turns)
    assert aggregation.sequence_weights("sequence_mean", turns, counts).tolist() == [1 / (2 * 2), 0.0, 1 / (2 * 4)]


def test_zero_importance_keeps_the_denominator_and_removal_does_not():
    lengths, offsets = torch.tensor([2, 2]), torch.tensor([0, 2, 4])
    losses = torch.ones(4)
    counts, _ = aggregation.count(lengths)
    w = aggregation.decision_weights(aggregation.sequence_weights("token_mean", lengths, counts), offsets)
    importance = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert aggregation.weighted_sum(losses, w, importance) == 0.75
    keep = importance > 0
    kept = compact(keep, offsets)[1].diff()
    counts, _ = aggregation.count(kept)
    w = aggregation.decision_weights(aggregation.sequence_weights("token_mean", kept, counts), offsets, keep)
    torch.testing.assert_close(aggregation.weighted_sum(losses, w), torch.tensor(1.0))


def test_nothing_leaks_from_weight_zero():
    losses = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    importance = torch.tensor([2.0, float("nan"), float("inf")])
    total = aggregation.weighted_sum(losses, torch.tensor([0.5, 0.0, 0.0]), importance)
    total.backward()
    assert total == 1.0
    assert losses.grad.tolist() == [1.0, 0.0, 0.0]


def test_importance_weights_carry_no_gradient():
    losses, importance = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    aggregation.weighted_sum(losses, torch.ones(2), importance).backward()
    assert importance.grad is None


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_batch_has_weights_of_zero_and_a_differentiable_loss(rule):
    lengths, offsets = torch.tensor([0, 0]), torch.tensor([0, 0, 0])
    counts, sizes = aggregation.count(lengths)
    assert counts == aggregation.GlobalCounts(0, 0, 0)
    per_sequence = weights_of(rule, lengths, counts, sizes)
    assert per_sequence.tolist() == [0.0, 0.0]
    x = torch.zeros(0, requires_grad=True)
    loss = aggregation.weighted_sum(x, aggregation.decision_weights(per_sequence, offsets))
    loss.backward()
    assert loss == 0


@pytest.mark.parametrize("rule", ["prompt_mean", "constant", "mean"])
def test_a_rule_without_its_argument_is_refused(rule):
    counts, _ = aggregation.count(torch.tensor([1]))
    with pytest.raises(ConfigError, match=rule):
        aggregation.sequence_weights(rule, torch.tensor([1]), counts)
