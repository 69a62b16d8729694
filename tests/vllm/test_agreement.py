"""A real vLLM against the real trainer on the same tiny checkpoint: routes, log-probs, and what replay repairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.engines.canary import Canary, check_canary, mean_k3
from megatron_rl.engines.vllm.engine import VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.rollouts.store import read_batch
from megatron_rl.rollouts.validate import validate
from tests.vllm import trainer
from tests.vllm.conftest import VOCAB, KeepOpen, Published
from tests.vllm.proxy import FaultProxy

TEMPERATURE, STOP = 0.8, 5
PROMPT_LENGTHS = (1, 2, 5, 17, 40, 90)


def prompts(seed: int) -> list[list[int]]:
    """Random prompts of several lengths, over a block boundary of vLLM's cache too."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture
def engine(inprocess, published: Published) -> Iterator[VllmEngine]:
    """An engine over the in-process replica at version 0; the replica outlives it."""
    with VllmEngine([KeepOpen(inprocess)], published.v0, temperature=TEMPERATURE) as made:
        yield made


def test_float32_routes_are_the_trainers_and_logprobs_agree(engine: VllmEngine, published, ranks, tmp_path) -> None:
    sent = prompts(1)
    first = engine.generate(sent, 24, [STOP])
    assert all(len(g.tokens) == 24 or g.tokens[-1] == STOP for g in first)
    # A second turn continues the exact tokens and finds the first one's prefix stored.
    longer = [[*p, *g.tokens.tolist(), 3, 9] for p, g in zip(sent, first, strict=True)]
    sent, found = sent + longer, first + engine.generate(longer, 24, [STOP])
    directory = trainer.record(engine.header("words"), sent, found, tmp_path)
    batch = read_batch(directory)
    validate(
        batch, expected=engine.header("words").fingerprint, replay=True, current_version=0, temperature=TEMPERATURE
    )
    (scores,) = ranks.run(trainer.score_recorded, 1, str(published.v0), str(directory), "float32", TEMPERATURE)
    recorded = np.asarray(batch.logprobs)[np.asarray(batch.action_mask)]
    assert np.abs(recorded - scores.native).max() < 1e-4
    assert np.abs(recorded - scores.replayed).max() < 1e-4
    for recorded_routes, native in zip(batch.routes, scores.routes, strict=True):
        np.testing.assert_array_equal(np.sort(recorded_routes, -1), np.sort(native, -1))


def test_temperature_and_greedy(engine: VllmEngine) -> None:
    (best,) = engine.generate([[1, 2, 3]], 6, [], greedy=True)
    (again,) = engine.generate([[1, 2, 3]], 6, [], greedy=True)
    np.testing.assert_array_equal(best.tokens, again.tokens)
    engine.reseed(4)
    first = engine.generate([[1, 2, 3]], 12, [])[0].tokens
    engine.reseed(4)
    np.testing.assert_array_equal(first, engine.generate([[1, 2, 3]], 12, [])[0].tokens)


def test_score_and_canary(engine: VllmEngine, published: Published) -> None:
    canary = Canary.read(published.v0)
    assert check_canary(engine, canary, max_k3=1e-6) < 1e-6
    assert mean_k3(Canary.read(published.v1).logprobs, engine.score(canary.tokens.tolist())) > 0.1
    assert engine.version == 0 and engine.header("x").engine.startswith("vllm/")


def test_bfloat16_mismatch_shrinks_under_replay(proxy: FaultProxy, published: Published, ranks, tmp_path: Path, capsys):
    with VllmEngine([HttpReplica(proxy.url)], published.v0, temperature=TEMPERATURE) as engine:
        sent = [prompt for seed in range(6) for prompt in prompts(seed)]
        found = engine.generate(sent, 40, [])
        directory = trainer.record(engine.header("words"), sent, found, tmp_path)
    (scores,) = ranks.run(trainer.score_recorded, 1, str(published.v0), str(directory), "bfloat16", TEMPERATURE)
    recorded = np.concatenate([g.logprobs for g in found])
    rows = {"own routes": scores.native, "replayed": scores.replayed}
    k3 = {name: mean_k3(np.append(0, values), np.append(0, recorded)) for name, values in rows.items()}
    beyond = {name: float(np.mean(np.abs(values - recorded) > np.log(2))) for name, values in rows.items()}
    flipped = [
        (np.sort(g.routes, -1) != np.sort(native, -1)).any(-1) for g, native in zip(found, scores.routes, strict=True)
    ]
    share = np.concatenate([part.ravel() for part in flipped]).mean()
    with capsys.disabled():
        print(f"\nbfloat16, {len(recorded)} tokens, {share:.2%} of rows routed otherwise by the trainer")
        for name in rows:
            print(f"  {name:<11} mean k3 {k3[name]:.2e}   F(2) {beyond[name]:.2e}")
    assert k3["replayed"] < k3["own routes"] and k3["replayed"] < 5e-3
    assert beyond["replayed"] <= beyond["own routes"]
