"""Where rewards land, what follows the last decision, value loss, explained variance, EWMA, segments, diagnostics."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.objectives import diagnostics, ewma, importance, rewards, segments, value
from megatron_rl.objectives.numerics import merge_moments, moments


def test_rewards_land_on_last_decisions_and_add_up():
    offsets, turns = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 3, 5])
    placed = rewards.place_rewards(torch.tensor([10.0, 99.0, 20.0]), offsets, torch.tensor([1.0, 2.0, 3.0]), turns)
    assert placed.tolist() == [0.0, 1.0, 12.0, 0.0, 23.0]
    assert rewards.place_rewards(torch.tensor([1.0, 2.0, 3.0]), offsets).tolist() == [0.0, 0.0, 1.0, 0.0, 3.0]
    assert rewards.place_rewards(torch.zeros(1), torch.tensor([0, 0])).shape == (0,)


def test_turn_rewards_without_turns_are_refused():
    with pytest.raises(RolloutError, match="turn"):
        rewards.place_rewards(torch.zeros(1), torch.tensor([0, 1]), torch.zeros(1))
    with pytest.raises(RolloutError, match="turn"):
        rewards.place_rewards(torch.zeros(1), torch.tensor([0, 2]), torch.zeros(2), torch.tensor([0, 2]))


def test_overlong_penalty_is_continuous_and_bounded():
    lengths = torch.arange(0, 40)
    penalty = rewards.soft_overlong_penalty(lengths, 30, 10)
    assert penalty[:21].abs().max() == 0
    assert torch.equal(penalty[30:], torch.full((10,), -1.0).double())
    torch.testing.assert_close(penalty[20:31].diff(), torch.full((10,), -0.1).double())
    with pytest.raises(ConfigError, match="buffer"):
        rewards.soft_overlong_penalty(lengths, 30, 0)


def test_successor_values_follow_the_ending():
    truncated = torch.tensor([False, True, True])
    known = torch.tensor([True, True, False])
    values = torch.tensor([float("nan"), 0.5, float("nan")])
    with pytest.raises(RolloutError, match="row=2") as error:
        rewards.successor_values(truncated, known, values)
    assert "algorithm.missing_boundary" in str(error.value)
    for policy_, keep in (("drop", [True, True, False]), ("zero", [True, True, True])):
        bootstrap, kept = rewards.successor_values(truncated, known, values, policy_)
        assert bootstrap.tolist() == [0.0, 0.5, 0.0]
        assert kept.tolist() == keep


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_against_the_definition_and_finite_differences(clip):
    generator = torch.Generator().manual_seed(3)
    v, old, g = torch.randn(3, 30, generator=generator, dtype=torch.float64)
    v.requires_grad_()
    loss, clipped = value.value_loss(v, g, old, clip)
    definition = 0.5 * (v - g) ** 2
    if clip is not None:
        bounded = old + (v - old).clamp(-clip, clip)
        definition = torch.maximum(definition, 0.5 * (bounded - g) ** 2)
    torch.testing.assert_close(loss, definition)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    assert torch.equal(gradient == 0, clipped)
    assert torch.autograd.gradcheck(lambda x: value.value_loss(x, g, old, clip)[0], v)


def test_explained_variance_of_perfect_useless_and_constant():
    returns = torch.randn(50, dtype=torch.float64)

    def explained(g, v):
        parts = [torch.split(x, [20, 0, 30]) if len(x) == 50 else [x] for x in (g, g - v)]
        return float(value.explained_variance(*[merge_moments(moments(p) for p in part) for part in parts]))

    assert explained(returns, returns + 3.0) == pytest.approx(1.0)
    assert explained(returns, torch.zeros(50)) == pytest.approx(0.0)
    assert explained(torch.full((6,), 0.7), torch.randn(6)) == 0.0
    assert explained(torch.zeros(0), torch.zeros(0)) == 0.0


def test_ewma_is_the_weighted_mean_of_all_weights():
    history = torch.randn(6, 4, dtype=torch.float64)
    average, z = [history[0].clone(), history[0, :2].clone()], 1.0
    for theta in history[1:]:
        z = ewma.ewma_update(z, 0.8, average, [theta, theta[:2]])
    decays = 0.8 ** torch.arange(5, -1, -1, dtype=torch.float64)
    assert z == pytest.approx(float(decays.sum()))
    expected = (decays[:, None] * history).sum(0) / decays.sum()
    torch.testing.assert_close(average[0], expected)
    torch.testing.assert_close(average[1], expected[:2])


def test_ewma_of_unchanged_weights_is_bit_exact_and_in_place():
    theta = torch.randn(1000).bfloat16()
    average = [theta.float()]
    same = average[0]
    ewma.ewma_update(3.7, 0.889, average, [theta])
    assert average[0] is same
    assert torch.equal(same, theta.float())
    with pytest.raises(ValueError, match="zip"):
        ewma.ewma_update(1.0, 0.889, average, [])
    with pytest.raises(ConfigError, match="decay"):
        ewma.ewma_update(1.0, 1.0, average, [theta])


def test_ewma_rescaling_moves_the_centre_of_mass():
    assert ewma.centre_of_mass(0.889) == pytest.approx(8, rel=2e-3)
    assert ewma.centre_of_mass(ewma.rescaled_decay(0.889, 4)) == pytest.approx(4 * ewma.centre_of_mass(0.889))


def test_segments_with_empty_ones_everywhere():
    offsets = torch.tensor([0, 0, 2, 2, 3, 3])
    x = torch.tensor([1.0, 2.0, 4.0])
    assert segments.local_segment_sum(x, offsets).tolist() == [0.0, 3.0, 0.0, 4.0, 0.0]
    assert segments.segment_mean(x, offsets).tolist() == [0.0, 1.5, 0.0, 4.0, 0.0]
    assert segments.segment_all(x > 1, offsets).tolist() == [True, False, True, True, True]
    assert segments.last_positions(offsets).tolist() == [1, 2]
    assert segments.repeat(torch.arange(5.0), offsets).tolist() == [1.0, 1.0, 3.0]
    with pytest.raises(RolloutError, match="5 segments"):
        segments.repeat(torch.arange(4.0), offsets)


def test_long_float32_sums_do_not_drift():
    x = torch.full((1_000_000,), 0.1)
    total = segments.local_segment_sum(x, torch.tensor([0, 1_000_000]))
    assert total.dtype == torch.float32
    assert float(total[0]) == pytest.approx(float(x[0].double()) * 1e6, rel=1e-7)


def test_compacting_keeps_nan_out_of_forward_and_backward():
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    positions, offsets = segments.compact(torch.tensor([True, False, True]), torch.tensor([0, 2, 3]))
    segments.segment_mean(x[positions], offsets).sum().backward()
    assert offsets.tolist() == [0, 1, 2]
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


def test_mismatch_of_a_policy_with_itself_and_with_another():
    lp = -torch.rand(50, dtype=torch.float64) * 3
    same = diagnostics.mismatch(lp, lp)
    assert [float(importance.ratio(s)) for s in same[:4]] == [0.0] * 4
    assert same.largest == 0
    torch.testing.assert_close(diagnostics.pearson(same.probabilities), torch.tensor(1.0).double())
    other = lp + torch.randn(50, dtype=torch.float64)
    found = diagnostics.mismatch(other, lp)
    halves = [diagnostics.mismatch(other[s], lp[s]) for s in (slice(0, 7), slice(7, 50))]
    for whole, a, b in zip(found[:4], halves[0][:4], halves[1][:4], strict=True):
        torch.testing.assert_close(whole, a + b)
    d = lp - other
    assert float(importance.ratio(found.k1)) == pytest.approx(float(d.mean()))
    assert float(importance.ratio(found.k3)) == pytest.approx(float(((-d).exp() - 1 + d).mean()))
    assert float(importance.ratio(found.extreme2)) == pytest.approx(float((d.abs() > math.log(2)).double().mean()))
    assert float(found.largest) == pytest.approx(float(d.abs().max()))
    expected = torch.corrcoef(torch.stack((other.exp(), lp.exp())))[0, 1]
    torch.testing.assert_close(
        diagnostics.pearson(halves[0].probabilities + halves[1].probabilities), expected, rtol=1e-9, atol=0
    )


def test_mismatch_of_nothing_and_of_extremes():
    nothing = diagnostics.mismatch(torch.zeros(0), torch.zeros(0))
    assert importance.ratio(nothing.k1) == 0
    assert nothing.largest == 0
    assert diagnostics.pearson(nothing.probabilities) == 0
    extreme = diagnostics.mismatch(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert all(torch.isfinite(s).all() for s in extreme)
    assert diagnostics.pearson(diagnostics.pearson_sums(torch.ones(3), torch.rand(3))) == 0


def test_sums_by_position():
    values, positions = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 9, 10, 500])
    found = diagnostics.sums_by_position(values, positions, torch.tensor([10, 100]))
    assert found.tolist() == [[3.0, 2.0], [3.0, 1.0], [4.0, 1.0]]


def test_staleness_histogram_collects_the_tail():
    assert diagnostics.staleness_histogram(torch.tensor([0, 0, 1, 7]), 2).tolist() == [2, 1, 1]
    assert diagnostics.staleness_histogram(torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0, 0]


def test_prompt_information_is_bounded_by_the_number_of_prompts():
    lengths = torch.tensor([10, 20])
    certain = diagnostics.prompt_information(torch.tensor([[-1.0, -1e4], [-1e4, -2.0]]), lengths)
    expected = math.log(2) * (1 / 10 + 1 / 20) / 2
    assert float(importance.ratio(certain.mutual_information)) == pytest.approx(expected)
    assert importance.ratio(certain.retrieval) == 1
    blind = diagnostics.prompt_information(torch.full((2, 2), -5.0), lengths)
    assert float(importance.ratio(blind.mutual_information)) == pytest.approx(0, abs=1e-12)
