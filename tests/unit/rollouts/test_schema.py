"""The record types: their examples run, and a fingerprint is taken from a model's configuration."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import SimpleNamespace

from megatron_rl.rollouts import schema
from tests.unit.rollouts.records import MODEL


def test_the_examples_of_the_records_run(tmp_path: Path) -> None:
    """Later examples use what earlier ones made."""
    names = vars(schema) | {"directory": tmp_path / "rollouts"}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for record in (schema.RolloutHeader, schema.Trajectory, schema.RolloutBatch):
        (example,) = finder.find(record, globs=names)
        assert example.examples
        example.globs = names
        runner.run(example, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0


def test_a_fingerprint_is_the_models() -> None:
    config = SimpleNamespace(model_type="toy_moe", vocab_size=32, num_experts=8, topk=2, moe_layers=(1, 2, 3))
    assert schema.ModelFingerprint.of(config, "abc") == MODEL
