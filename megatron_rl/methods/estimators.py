"""Advantage estimators by name. The mathematics is `megatron_rl.objectives.advantages` and `.groups`.

Axis letters: D decisions, K turns, B trajectories of the whole rollout batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from megatron_rl.methods.policy_interface import Unit
from megatron_rl.methods.registry import Method, class_from_function, kind, options_of, register

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.rollouts.schema import RolloutBatch


@dataclass(frozen=True)
class Timeline:
    """Decisions, turns and trajectories of a batch."""

    offsets: Tensor
    """int64 [B+1] into decisions."""
    turn_offsets: Tensor
    """int64 [K+1] into decisions; no turn is empty."""
    sequence_turns: Tensor
    """int64 [B+1] into turns."""

    @property
    def turn_starts(self) -> Tensor:
        """bool [D]: the first decision of each turn."""
        import torch

        first = torch.zeros(int(self.offsets[-1]), dtype=torch.bool, device=self.offsets.device)
        first[self.turn_offsets[:-1]] = True
        return first


@dataclass(frozen=True)
class EstimatorInputs:
    """What advantages are formed from."""

    batch: RolloutBatch
    """The recorded trajectories, for estimators that read more than rewards."""
    times: Timeline
    rewards: Tensor
    """float64 [D], shaped."""
    kept: Tensor
    """bool [D]: decisions of trajectories in play; only these enter statistics."""
    gamma: float
    """Discount per decision, per turn for an estimator whose unit is the turn."""
    values: Tensor | None = None
    """float64 [D] of the critic; None without one."""
    bootstrap: Tensor | None = None
    """float64 [B]: value of what followed a truncation, 0 elsewhere; None without a critic."""
    monte_carlo: bool = False
    """Critic targets with λ = 1 (value pretraining)."""

    @property
    def group_ids(self) -> Tensor:
        """int64 [B]: equal numbers are responses of one group."""
        import numpy as np
        import torch

        ids = np.unique(np.asarray(self.batch.group_ids), return_inverse=True)[1].reshape(-1)
        return torch.as_tensor(ids, device=self.rewards.device)

    @property
    def included(self) -> Tensor:
        """bool [B]: trajectories in play."""
        from megatron_rl.objectives.segments import local_segment_sum

        return local_segment_sum(self.kept, self.times.offsets) > 0

    @property
    def returns(self) -> Tensor:
        """float64 [B]: undiscounted sum of each trajectory's shaped rewards."""
        from megatron_rl.objectives.segments import local_segment_sum

        return local_segment_sum(self.rewards, self.times.offsets)

    def of_critic(self) -> tuple[Tensor, Tensor]:
        """(values, bootstrap) of an estimator that has a critic."""
        if self.values is None or self.bootstrap is None:
            raise RuntimeError("this estimator reads a critic: needs_critic must be true of it")
        return self.values, self.bootstrap


@dataclass(frozen=True)
class Estimate:
    """What an estimator gives."""

    advantages: Tensor
    """float64 [D], before whitening."""
    returns: Tensor | None = None
    """float64 [D] critic targets; None without a critic."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@kind
class AdvantageEstimator(Method):
    """An advantage estimator."""

    whiten: bool = True
    """Whiten advantages over all policy-loss decisions of the rollout batch."""

    setting, default = "algorithm.estimator", "gae"
    needs_critic: ClassVar[bool] = False
    """Whether it reads a critic; without, none is built."""
    needs_groups: ClassVar[bool] = False
    """Whether it compares responses to one prompt."""
    leaves_out_alone: ClassVar[bool] = False
    """Whether a response that is alone in its group has no advantage and is left out."""
    unit: ClassVar[Unit] = "decision"
    """What has one advantage: a decision, a turn, or a whole sequence; none: there are no advantages."""
    reads_rewards: ClassVar[bool] = True
    """Whether it reads the rewards that KL and length penalties shape."""

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """Advantages of the decisions, and targets of the critic where there is one."""
        raise NotImplementedError

    def contradiction(self, algorithm: Any) -> str | None:
        """Why the rest of `algorithm` (an `AlgorithmConfig`) does not go with this estimator's options, or None."""
        return None

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> type[Method]:
        """Of `f(x: EstimatorInputs, *, options…) → [D] advantages or Estimate`: an estimator without a critic."""

        def estimate(self: AdvantageEstimator, x: EstimatorInputs) -> Estimate:
            options = {name: value for name, value in options_of(self).items() if name != "whiten"}
            found = function(x, **options)
            return found if isinstance(found, Estimate) else Estimate(found)

        return class_from_function(cls, function, estimate=estimate)


@register
class GAE(AdvantageEstimator):
    """Generalised advantage estimation on decisions (1506.02438), λ apart for actor and critic (VC-PPO, 2503.01491)."""

    name: Literal["gae"] = "gae"
    lam_actor: float = Field(0.95, ge=0, le=1)
    """λ of the policy's advantages."""
    lam_alpha: float | None = Field(None, gt=0)
    """α of the length-adaptive λ = 1 − 1/(αJ), which replaces lam_actor (0.05 in VAPO, 1.5 in SAO); null: off."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """λ of the critic's returns."""
    needs_critic = True

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """Advantages and returns of each decision."""
        return self._estimate(x)[0]

    def _estimate(self, x: EstimatorInputs) -> tuple[Estimate, dict[str, Any]]:
        from megatron_rl.objectives.advantages import gae, length_adaptive_lambda

        values, bootstrap = x.of_critic()
        lam_actor: float | Tensor = self.lam_actor
        if self.lam_alpha is not None:
            lam_actor = length_adaptive_lambda(x.times.offsets.diff(), x.gamma, self.lam_alpha)
        lam_critic = 1.0 if x.monte_carlo else self.lam_critic
        settings: dict[str, Any] = dict(gamma=x.gamma, lam_actor=lam_actor, lam_critic=lam_critic, bootstrap=bootstrap)
        advantages, returns = gae(x.rewards, values, x.times.offsets, **settings)
        return Estimate(advantages, returns, _explained(returns[x.kept], values[x.kept])), settings

    def contradiction(self, algorithm: Any) -> str | None:
        """The length-adaptive λ divides by γ."""
        if self.lam_alpha is None or algorithm.gamma > 0:
            return None
        return "length-adaptive λ divides by gamma, which is 0: set estimator.lam_alpha to null or gamma above 0"


@register
class EVPO(GAE):
    """GAE while the critic explains variance, else the batch's mean return as baseline."""

    name: Literal["evpo"] = "evpo"  # type: ignore[assignment]

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """Advantages of whichever is better, and the critic's returns."""
        from megatron_rl.objectives.advantages import evpo, gae
        from megatron_rl.objectives.numerics import moments

        found, settings = self._estimate(x)
        values, _ = x.of_critic()
        sampled = gae(x.rewards, values, x.times.offsets, **settings | {"lam_critic": 1.0})[1]
        seen = (moments(sampled[x.kept]), moments((sampled - values)[x.kept]))
        advantages, explained = evpo(found.advantages, sampled, *seen)
        metrics = {"evpo/explained_variance": float(explained), "evpo/critic": float(explained > 0)}
        return Estimate(advantages, found.returns, {**found.metrics, **metrics})


@register
class TurnGAE(AdvantageEstimator):
    """GAE whose steps are turns, with a critic on turns (Turn-PPO, 2512.17008: gamma 0.99, λ 0.9)."""

    name: Literal["turn_gae"] = "turn_gae"
    lam_actor: float = Field(0.95, ge=0, le=1)
    """λ of the policy's advantages, per turn."""
    lam_critic: float = Field(1.0, ge=0, le=1)
    """λ of the critic's returns, per turn."""
    needs_critic = True
    unit: ClassVar[Unit] = "turn"

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """A turn's advantage at each of its decisions; returns at its first decision."""
        from megatron_rl.objectives.advantages import turn_gae
        from megatron_rl.objectives.segments import repeat
        from megatron_rl.objectives.value import place_on_first_decisions

        (values, bootstrap), turns = x.of_critic(), x.times.turn_offsets
        per_turn, targets = turn_gae(
            x.rewards, values, turns, x.times.sequence_turns, gamma=x.gamma, lam_actor=self.lam_actor,
            lam_critic=1.0 if x.monte_carlo else self.lam_critic, bootstrap=bootstrap,
        )  # fmt: skip
        returns, at = place_on_first_decisions(targets, turns), x.kept & x.times.turn_starts
        return Estimate(repeat(per_turn, turns), returns, _explained(returns[at], values[at]))


class _SequenceEstimator(AdvantageEstimator):
    """An estimator with one advantage for a whole trajectory, from returns alone."""

    unit: ClassVar[Unit] = "sequence"

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        raise NotImplementedError

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """The trajectory's advantage at each of its decisions."""
        from megatron_rl.objectives.segments import repeat

        return Estimate(repeat(self.per_sequence(x), x.times.offsets))


@register
class BatchMean(_SequenceEstimator):
    """Return minus the batch's mean return (REINFORCE with a baseline)."""

    name: Literal["batch_mean"] = "batch_mean"

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        from megatron_rl.objectives.groups import batch_mean_baseline

        return batch_mean_baseline(x.returns, x.included)


class _GroupEstimator(_SequenceEstimator):
    """An estimator that compares a trajectory with the others of its group."""

    needs_groups = True


@register
class GRPO(_GroupEstimator):
    """Return minus the group's mean, over the group's standard deviation (2402.03300)."""

    name: Literal["grpo"] = "grpo"

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        from megatron_rl.objectives.groups import grpo

        return grpo(x.returns, x.group_ids, x.included)


@register
class DrGRPO(_GroupEstimator):
    """Return minus the group's mean (2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        from megatron_rl.objectives.groups import dr_grpo

        return dr_grpo(x.returns, x.group_ids, x.included)


@register
class RLOO(_GroupEstimator):
    """Return minus the mean of the group's other responses (2402.14740)."""

    name: Literal["rloo"] = "rloo"
    leaves_out_alone = True

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        from megatron_rl.objectives.groups import rloo

        return rloo(x.returns, x.group_ids, x.included)


@register
class VPO(_GroupEstimator):
    """GRPO on the best answer of a response's set, averaged over directions of a reward vector."""

    name: Literal["vpo"] = "vpo"
    draws: int = Field(64, ge=1)
    """Dirichlet draws over which the best answer of a set is averaged, shared by a prompt's rollouts."""
    reads_rewards = False

    def per_sequence(self, x: EstimatorInputs) -> Tensor:
        """float64 [B]."""
        from megatron_rl.objectives.groups import grpo

        returns = self.set_returns(x.batch, x.group_ids, x.included)
        return grpo(returns, x.group_ids, x.included)

    def set_returns(self, batch: RolloutBatch, ids: Tensor, included: Tensor) -> Tensor:
        """R(set) of each trajectory, float64 [B]; 0 where not included.

        A trajectory's answers are the rows of `answer_rewards` in its metadata, or its one `reward_vector`. The draws
        are a function of the group's name, hence the same for all its rollouts, on every rank and after a resume.

        Raises:
            RolloutError: a trajectory has neither, or the number of components differs within a group.
        """
        import zlib

        import numpy as np
        import torch

        from megatron_rl.objectives import groups

        result = torch.zeros(len(batch), dtype=torch.float64, device=ids.device)
        for group in ids[included].unique():
            rows = ((ids == group) & included).nonzero().squeeze(-1)
            answers = [_answers(batch, int(row)) for row in rows]
            _check_components(batch, rows.tolist(), answers)
            generator = torch.Generator().manual_seed(zlib.crc32(batch.group_ids[int(rows[0])].encode()))
            draws = groups.dirichlet_draws(self.draws, answers[0].shape[1], generator)
            cut = torch.tensor(np.cumsum([0] + [len(a) for a in answers]))
            result[rows] = groups.set_rewards(torch.cat(answers), cut, draws).to(ids.device)
        return result


@register
class NoAdvantages(AdvantageEstimator):
    """For losses that need no advantages (DRPO)."""

    name: Literal["none"] = "none"
    unit: ClassVar[Unit] = "none"
    reads_rewards = False

    def estimate(self, x: EstimatorInputs) -> Estimate:
        """Zeros."""
        import torch

        return Estimate(torch.zeros_like(x.rewards))


def _explained(returns: Tensor, values: Tensor) -> dict[str, float]:
    from megatron_rl.objectives.numerics import moments
    from megatron_rl.objectives.value import explained_variance

    return {"critic/explained_variance": float(explained_variance(moments(returns), moments(returns - values)))}


def _check_components(batch: RolloutBatch, rows: list[int], answers: list[Tensor]) -> None:
    """One direction w scores all answers of a group: they need the same components."""
    from megatron_rl.errors import RolloutError

    for row, found in zip(rows, answers, strict=True):
        if found.shape[1] != answers[0].shape[1]:
            file, line = batch.sources[row]
            raise RolloutError(
                "reward vectors of one group differ in length", file=file, row=line, field="reward_vector",
                found=found.shape[1], expected=answers[0].shape[1],
            )  # fmt: skip


def _answers(batch: RolloutBatch, row: int) -> Tensor:
    """float64 [answers, R]."""
    import numpy as np
    import torch

    from megatron_rl.errors import RolloutError

    recorded = batch.metadata[row].get("answer_rewards") if batch.metadata else None
    if recorded is None and batch.reward_vectors and batch.reward_vectors[row] is not None:
        recorded = [batch.reward_vectors[row]]
    if recorded is None:
        file, line = batch.sources[row]
        raise RolloutError(
            "VPO scores sets of answers by reward vectors, and none is recorded", file=file, row=line,
            field="reward_vector", expected="reward_vector, or answer_rewards in the metadata",
            setting="algorithm.estimator, or a task that records reward vectors",
        )  # fmt: skip
    return torch.as_tensor(np.asarray(recorded, np.float64).reshape(len(recorded), -1))
