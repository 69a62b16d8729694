"""Every tensor accounted for: what a checkpoint should hold against what it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.importer import read_tensor, stored_as
from megatron_rl.hf.inventory import (
    HFTensor,
    dropped_note,
    expected_names,
    hf_tensors,
    is_stored,
    model_parameters,
    mtp_names,
    rule_for,
)
from megatron_rl.hf.reader import SafetensorsReader, count_non_finite, extremes
from megatron_rl.hf.value_head import is_zero_head_bias

Kind = Literal["missing", "unexpected", "duplicate", "shape", "non_finite", "constant", "tied", "experts"]
"""* `missing`, `unexpected`, `duplicate`: names against the model's; `shape`: against the model's sizes.
* `non_finite`: NaN or infinity. `constant`: all entries equal, which neither training nor initialisation leaves.
* `tied`: the configuration ties embeddings, yet an output layer with other values is present.
* `experts`: a layer holds fewer whole experts than the model has."""


@dataclass(frozen=True)
class Problem:
    """One fault of one tensor."""

    kind: Kind
    tensor: str
    found: object
    expected: object

    def error(self, file: object = None) -> CheckpointError:
        """The exception that reports it."""
        return CheckpointError(
            f"{self.kind} tensor", file=file, field=self.tensor, found=self.found, expected=self.expected
        )


@dataclass(frozen=True)
class AuditReport:
    """All faults found, and how many tensors were seen."""

    problems: tuple[Problem, ...]
    tensors: int
    notes: tuple[str, ...] = ()
    """What is left out on purpose, a line each."""

    def of(self, kind: Kind) -> list[str]:
        """Names of the tensors with a fault of one kind."""
        return [problem.tensor for problem in self.problems if problem.kind == kind]

    def raise_for_problems(self, file: object = None) -> None:
        """Raise CheckpointError for the first problem, with the count of each kind; do nothing when there is none."""
        if not self.problems:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(p.kind for p in self.problems).items())
        first = self.problems[0].error(file)
        first_line = f"checkpoint does not add up ({counts}); first: {first.what}"
        raise CheckpointError(first_line, file=file, field=first.field, found=first.found, expected=first.expected)


class Audit:
    """Counts tensors as they stream by, under the names exports write."""

    def __init__(self, config: HFModelConfig) -> None:
        self._expected = expected_names(config)
        self._may_be_constant = {
            tensor.written_as[0]
            for rule, layer, expert in model_parameters(config)
            if rule.may_be_constant and is_stored(config, rule)
            for tensor in hf_tensors(config, rule, layer, expert)
        }
        self._tied = set(tied_names(config))
        self._seen: set[str] = set()
        self._problems: list[Problem] = []

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor that belongs to the model."""
        return dict(self._expected)

    def observe(self, name: str, tensor: Tensor) -> list[Problem]:
        """Check one tensor and remember it; returns its own faults."""
        found = self._name_problems(name) or self._value_problems(name, tensor)
        self._seen.add(name)
        self._problems += found
        return found

    def report(self) -> AuditReport:
        """All faults so far, with every expected tensor not yet seen reported missing."""
        missing = [
            Problem("missing", name, "nothing", shape)
            for name, shape in self._expected.items()
            if name not in self._seen
        ]
        return AuditReport((*self._problems, *missing), len(self._seen))

    def _name_problems(self, name: str) -> list[Problem]:
        if name in self._seen:
            return [Problem("duplicate", name, "twice", "once")]
        if name in self._tied:
            return [Problem("tied", name, "an output layer", "none: tie_word_embeddings is set")]
        if name not in self._expected:
            return [Problem("unexpected", name, "a tensor", "none of this name in the model")]
        return []

    def _value_problems(self, name: str, tensor: Tensor) -> list[Problem]:
        return value_problems(name, tensor, self._expected[name], may_be_constant=name in self._may_be_constant)


def value_problems(name: str, tensor: Tensor, shape: tuple[int, ...], *, may_be_constant: bool) -> list[Problem]:
    """The first fault of a tensor's shape or entries, as a list of none or one."""
    if tuple(tensor.shape) != shape:
        return [Problem("shape", name, tuple(tensor.shape), shape)]
    low, high = extremes(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return [Problem("non_finite", name, f"{count_non_finite(tensor)} NaN or inf", "finite values")]
    if not may_be_constant and tensor.numel() > 1 and bool(low == high):
        return [Problem("constant", name, f"every entry {low.item()}", "trained weights")]
    return []


def tied_names(config: HFModelConfig) -> dict[str, str]:
    """HF name of an output layer that should not be stored → the embedding whose values it shares."""
    return {
        source.name: twin.name
        for rule, _, _ in model_parameters(config)
        if rule.tied_to and not is_stored(config, rule)
        for source, twin in zip(rule.sources, rule_for(config, rule.tied_to).sources, strict=True)
    }


def audit_checkpoint(reader: SafetensorsReader, config: HFModelConfig, *, values: bool = True) -> AuditReport:
    """Compare a checkpoint directory with what its configuration says it holds. Faults are collected, not raised.

    Args:
        values: also read every tensor, one at a time, for non-finite and constant ones; otherwise only headers.

    Raises:
        CheckpointError: a file cannot be read at all.
    """
    headers = reader.headers()
    used: set[str] = set(mtp_names(config, headers))
    problems: list[Problem] = []
    broken: set[tuple[int | None, int | None]] = set()
    for rule, layer, expert in model_parameters(config):
        if not is_stored(config, rule):
            continue
        for tensor in hf_tensors(config, rule, layer, expert):
            name, shape = stored_as(reader, tensor)
            used.add(name)
            if name not in reader or reader.file(name).name not in headers.get(name, ()):
                problems.append(Problem("missing", tensor.name, "nothing", tensor.shape))
                broken |= {(layer, expert)} if rule.scope == "expert" else set()
            elif reader.shape(name) != shape:
                problems.append(Problem("shape", name, reader.shape(name), shape))
            elif values:
                problems += _stored_value_problems(reader, tensor, rule.may_be_constant)
    problems += _expert_problems(config, broken)
    problems += _surplus_problems(reader, config, headers, used, values)
    return AuditReport(tuple(dict.fromkeys(problems)), len(headers), tuple(dropped_note(config, headers)))


def _expert_problems(config: HFModelConfig, broken: set[tuple[int | None, int | None]]) -> list[Problem]:
    """Layers with fewer whole experts than the model has; `broken` are the (layer, expert) that lack a tensor."""
    lost = Counter(layer for layer, _ in broken if layer is not None)
    return [
        Problem("experts", f"model.layers.{layer}", config.num_experts - count, f"{config.num_experts} whole experts")
        for layer, count in sorted(lost.items())
    ]


def _stored_value_problems(reader: SafetensorsReader, tensor: HFTensor, may_be_constant: bool) -> list[Problem]:
    read = read_tensor(reader, tensor, [slice(0, size) for size in tensor.shape], check_finite=False)
    return value_problems(tensor.name, read, tensor.shape, may_be_constant=may_be_constant)


def _surplus_problems(
    reader: SafetensorsReader, config: HFModelConfig, headers: dict[str, tuple[str, ...]], used: set[str], values: bool
) -> list[Problem]:
    """Names held twice, and names the model does not have.

    A stored copy of a tied embedding is accepted where it is equal, a bias of the value head where it is zero.
    """
    problems = [
        Problem("duplicate", name, ", ".join(files), "one file") for name, files in headers.items() if len(files) > 1
    ]
    tied = tied_names(config)
    for name in sorted({*headers, *reader.names()} - used):
        if is_zero_head_bias(reader, config, name):
            continue
        if name not in tied:
            problems.append(Problem("unexpected", name, "a tensor", "none of this name in the model"))
        elif values and not torch.equal(reader.read(name), reader.read(tied[name])):
            problems.append(
                Problem("tied", name, "values of its own", f"those of {tied[name]}: tie_word_embeddings is set")
            )
    return problems
