"""β_KL goes towards its target, value pretraining ends when it stops helping, and both continue after a stop."""

from __future__ import annotations

import json

import pytest

from megatron_rl.algorithm.controllers import Controllers
from megatron_rl.config import AlgorithmConfig


def test_the_coefficient_finds_the_target_of_a_falling_divergence() -> None:
    controllers = Controllers(AlgorithmConfig(reference_kl={"name": "loss", "coef": 0.5, "target": 0.02, "gain": 1.0}))
    for iteration in range(60):
        shown = controllers.observe(iteration, {"policy/kl_to_reference": 0.04 / (1 + controllers.kl_coef)})
    assert 0.04 / (1 + shown["policy/kl_coef"]) == pytest.approx(0.02, rel=0.02)


def test_a_coefficient_without_target_stays() -> None:
    controllers = Controllers(AlgorithmConfig(reference_kl={"name": "reward", "coef": 0.3}))
    assert controllers.observe(0, {"policy/kl_to_reference": 9.0}) == {"policy/kl_coef": 0.3}
    assert controllers.kl_coef == 0.3


def test_pretraining_ends_when_explained_variance_stops_rising() -> None:
    controllers = Controllers(AlgorithmConfig(value={"warmup": {"iterations": 10, "patience": 2}}))
    for iteration, explained in enumerate([0.1, 0.3, 0.305, 0.5, 0.5, 0.4]):
        assert controllers.critic_only(iteration) and controllers.monte_carlo(iteration)
        controllers.observe(iteration, {"critic/explained_variance": explained})
    assert not controllers.critic_only(6) and not controllers.monte_carlo(6)


def test_pretraining_ends_at_its_limit_and_a_plain_warmup_runs_to_it() -> None:
    controllers = Controllers(AlgorithmConfig(value={"warmup": {"iterations": 3, "patience": 5}}))
    assert [controllers.critic_only(i) for i in range(5)] == [True] * 3 + [False] * 2
    plain = Controllers(AlgorithmConfig(value={"warmup": {"iterations": 3}}))
    for iteration in range(3):
        assert plain.critic_only(iteration) and not plain.monte_carlo(iteration)
        plain.observe(iteration, {"critic/explained_variance": 0.0})


def test_state_survives_json_and_goes_on() -> None:
    algorithm = AlgorithmConfig(
        reference_kl={"name": "loss", "coef": 0.5, "target": 0.02}, value={"warmup": {"iterations": 9, "patience": 3}}
    )
    metrics = [{"critic/explained_variance": e, "policy/kl_to_reference": e} for e in (0.3, 0.1, 0.1, 0.1)]
    whole, broken = Controllers(algorithm), Controllers(algorithm)
    for iteration, found in enumerate(metrics):
        whole.observe(iteration, found)
        broken.observe(iteration, found)
        rest = Controllers(algorithm)
        rest.restore(json.loads(json.dumps(broken.state())))
        broken = rest
    assert broken == whole and not whole.critic_only(4)


def test_a_changed_coefficient_wins_over_the_checkpoint_where_nothing_steers_it() -> None:
    changed = Controllers(AlgorithmConfig(reference_kl={"name": "loss", "coef": 0.1}))
    changed.restore(Controllers(AlgorithmConfig(reference_kl={"name": "loss", "coef": 0.5})).state())
    assert changed.kl_coef == 0.1
