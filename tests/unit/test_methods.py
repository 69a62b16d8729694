"""One door for a method: a user's function or class, chosen by name, is configured, checked and computed like ours."""

from __future__ import annotations

import pickle

import pytest
import torch

from megatron_rl.algorithm.step_losses import PolicyStepLoss
from megatron_rl.algorithm.timeline import timeline
from megatron_rl.algorithm.whole_step import StepVectors, whole_step_loss
from megatron_rl.batching import decision_offsets
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.methods import KINDS, EstimatorInputs, Segments, method_of
from tests.unit.algorithm.batches import batch_of

MINE = "tests.unit.methods_of_my_own"


def configured(*settings: str):
    return load_config(None, [f"algorithm.{setting}" for setting in settings]).algorithm


def test_keyword_parameters_of_a_function_are_its_options() -> None:
    algorithm = configured(f"policy={MINE}:squared", "policy.strength=2", "anchor=recompute")
    assert algorithm.policy.strength == 2.0 and algorithm.policy.clock == "decision"
    assert configured(f"policy={MINE}:squared", "anchor=recompute").policy.strength == 0.5
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    again = load_config(None, [f"algorithm={algorithm.model_dump_json()}"]).algorithm
    assert again == algorithm


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ([f"policy={MINE}:squared", "policy.strenth=2", "anchor=recompute"], "'strength'"),
        ([f"policy={MINE}:squared", "policy.strength=much", "anchor=recompute"], "policy.strength"),
        ([f"policy={MINE}:squared"], "no decoupled form"),
        ([f"policy={MINE}:GroupMedian"], "neither a function nor a subclass"),
        ([f"policy={MINE}:absent"], "cannot be imported"),
        ([f"policy={MINE}:TurnSquared", "estimator=none", "anchor=recompute"], "takes one a"),
        ([f"estimator={MINE}:GroupMedian", "anchor=recompute", "value.clip=0.2"], "has no critic"),
    ],
)
def test_what_does_not_fit_a_users_method_is_refused(settings: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        configured(*settings)


def test_a_users_loss_is_followed_per_decision() -> None:
    algorithm = configured(f"policy={MINE}:squared", "policy.strength=2", "anchor=recompute")
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages, anchor = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([-1.2, -2.0, -0.1])
    weights = torch.tensor([0.5, 0.25, 0.25])
    step = PolicyStepLoss(algorithm, StepVectors(advantages, anchor, anchor, None, weights, None), kl_coef=0.0)
    loss, _ = step(torch.arange(3), torch.stack((logprobs, torch.zeros(3))))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, weights * (-advantages + 2 * (logprobs - anchor)).detach())


def test_a_users_loss_of_turns_is_followed_on_the_whole_step() -> None:
    policy = configured(f"policy={MINE}:TurnSquared", "policy.strength=2", "anchor=recompute").policy
    logprobs, anchor = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.0, -0.1])
    advantages, weights = torch.tensor([1.0, -1.0, 0.5]), torch.full((3,), 1 / 3)
    segments = Segments(torch.tensor([0, 3]), torch.tensor([0, 2, 3]), torch.zeros(1, dtype=torch.int64), None)
    found = whole_step_loss(policy, logprobs, StepVectors(advantages, anchor, anchor, None, weights, None), segments)
    ratio = logprobs - anchor
    mean = torch.tensor([ratio[:2].mean(), ratio[:2].mean(), ratio[2]])
    # d/dℓ_j of Σ over the turn of mean²: each of a turn's n terms has derivative mean/n to each ℓ_j, n of them.
    torch.testing.assert_close(found.coefficients, (-advantages + 2 * mean) / 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [(f"{MINE}:median", [0.0, 2.0, -1.0, 1.0]), (f"{MINE}:GroupMedian", [0.0, 2.0, 0.0, 2.0])],
)
def test_a_users_estimator_gives_advantages(name: str, expected: list[float]) -> None:
    estimator = method_of("algorithm.estimator", {"name": name, "whiten": False})
    batch = batch_of([[1]] * 4, [1.0, 3.0, 0.0, 2.0], ["a", "a", "b", "b"])
    times = timeline(batch, torch.as_tensor(decision_offsets(batch.action_mask, batch.offsets)))
    rewards = torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    found = estimator.estimate(EstimatorInputs(batch, times, rewards, torch.ones(4, dtype=torch.bool), 1.0))
    assert found.advantages.tolist() == expected and found.returns is None


def test_every_kind_has_a_table_and_its_default_is_in_it() -> None:
    assert {"algorithm.policy", "algorithm.estimator", "algorithm.importance", "algorithm.aggregation"} <= set(KINDS)
    for kind in KINDS.values():
        assert kind.default is None or kind.default in kind.table
        assert all(method.model_fields["name"].default == name for name, method in kind.table.items())
