"""The methods a run can choose by name: policy losses, advantage estimators, importance corrections, aggregation rules.

A method is one class: its options are fields, its facts class variables, its mathematics one function over
`megatron_rl.objectives`. Configuration, refusals, the table in the docs and the tests of recipes are derived from it,
so a new method is added in one place: here, or in a package of one's own, chosen as `name: "package.module:Name"`.

Importing this room imports no torch: a configuration is read without it.
"""

# Imported for its table.
from megatron_rl.methods import policy_losses  # noqa: F401, I001
from megatron_rl.methods.aggregation_rules import AggregationRule
from megatron_rl.methods.anchors import Anchor, LossKL, ReferenceKL, RewardKL, SteeredKL
from megatron_rl.methods.registry import KINDS, Method, chosen, class_of, method_of, register
from megatron_rl.methods.estimators import AdvantageEstimator, Estimate, EstimatorInputs, Timeline
from megatron_rl.methods.corrections import CorrectionInputs, ImportanceCorrection
from megatron_rl.methods.policy_interface import PolicyInputs, PolicyLossMethod, PolicyTerm, Segments

__all__ = [
    "KINDS",
    "AdvantageEstimator",
    "AggregationRule",
    "Anchor",
    "CorrectionInputs",
    "Estimate",
    "EstimatorInputs",
    "ImportanceCorrection",
    "LossKL",
    "Method",
    "PolicyInputs",
    "PolicyLossMethod",
    "PolicyTerm",
    "ReferenceKL",
    "RewardKL",
    "Segments",
    "SteeredKL",
    "Timeline",
    "chosen",
    "class_of",
    "method_of",
    "register",
]
