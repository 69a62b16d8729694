"""Completions of a vLLM: both route layouts give the recorded one, and every misfit is refused by its field."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.engines.tiny import TinyShape
from megatron_rl.engines.vllm.completion import Completion, CompletionRequest, as_request, decode_array, to_generation
from megatron_rl.errors import EngineAnswerError
from megatron_rl.hf.config import HFModelConfig, read_hf_config

VOCAB, STOP = 32, 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HFModelConfig:
    """Four layers, the second dense, 8 experts, top-2."""
    folder: Path = tmp_path_factory.mktemp("model")
    config = TinyShape(dense_layers=(1,)).hf_config(VOCAB).to_dict()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    return read_hf_config(folder)


def good(prompt: int = 5, n: int = 3, limit: int = 8) -> tuple[CompletionRequest, Completion]:
    """A request and a completion that fits it, in the layout of all decoder layers."""
    rng = np.random.default_rng(prompt * 100 + n)
    routes = rng.random((prompt + n - 1, 4, 8)).argsort(-1)[..., :2].astype(np.uint8)
    routes[:, 1] = 0
    tokens = [1] * (n - 1) + [STOP if n < limit else 1]
    finish = "stop" if n < limit else "length"
    request = CompletionRequest(tuple(range(prompt)), limit, (STOP,))
    return request, Completion(tokens, [-0.5 - i for i in range(n)], finish, routes)


def spoiled(**changes: object) -> Completion:
    return dataclasses.replace(good()[1], **changes)


@given(prompt=st.integers(1, 9), n=st.integers(1, 8))
def test_both_layouts_give_the_same_routes(model: HFModelConfig, prompt: int, n: int) -> None:
    request, whole = good(prompt, n)
    moe_only = whole.routes[:, [0, 2, 3]].astype(np.int16)
    parts = dataclasses.replace(whole, routes=moe_only[prompt:], prompt_routes=moe_only[:prompt])
    first, second = (to_generation(request, completion, model, 7, who="x") for completion in (whole, parts))
    assert first.routes.dtype == np.uint8 and first.routes.shape == (3, prompt + n - 1, 2)
    for row in range(prompt + n - 1):
        for line, layer in enumerate((0, 2, 3)):
            assert first.routes[line, row].tolist() == whole.routes[row, layer].tolist()
    np.testing.assert_array_equal(first.routes, second.routes)
    assert first.version == 7 and first.tokens.dtype == np.int32 and first.logprobs.dtype == np.float32
    assert not first.interrupted


@pytest.mark.parametrize(
    ("completion", "field"),
    [
        (spoiled(routes=None), "routed_experts"),
        (spoiled(routes=good()[1].routes[:-1]), "routed_experts"),
        (spoiled(routes=np.concatenate([good()[1].routes] * 2)), "routed_experts"),
        (spoiled(routes=good()[1].routes[:, :3]), "routed_experts"),
        (spoiled(routes=good()[1].routes[..., :1]), "routed_experts"),
        (spoiled(routes=good()[1].routes.astype(np.float32)), "routed_experts"),
        (spoiled(routes=good()[1].routes + np.uint8(8)), "routed_experts"),
        (spoiled(routes=np.where(np.arange(7)[:, None, None] == 4, -1, good()[1].routes)), "routed_experts"),
        (spoiled(routes=good()[1].routes[5:], prompt_routes=good()[1].routes[:5]), "routed_experts"),
        (spoiled(routes=good()[1].routes[5:, :3], prompt_routes=good()[1].routes[:4, :3]), "routed_experts"),
        (spoiled(routes=good()[1].routes[5:, :3], prompt_routes=good()[1].routes[:5, 0]), "routed_experts"),
        (spoiled(logprobs=[-1.0, float("nan"), -1.0]), "logprobs"),
        (spoiled(logprobs=[-1.0, float("-inf"), -1.0]), "logprobs"),
        (spoiled(logprobs=[-1.0, 0.3, -1.0]), "logprobs"),
        (spoiled(logprobs=[-1.0, -1.0]), "logprobs"),
        (spoiled(tokens=[]), "tokens"),
        (spoiled(tokens=[1] * 9), "tokens"),
        (spoiled(tokens=[1, VOCAB, STOP]), "tokens"),
        (spoiled(tokens=[1, -1, STOP]), "tokens"),
        (spoiled(tokens=[1, STOP, STOP]), "tokens"),
        (spoiled(tokens=[1, 1, 1]), "finish_reason"),
        (spoiled(finish="error"), "finish_reason"),
    ],
)
def test_misfit_is_refused(model: HFModelConfig, completion: Completion, field: str) -> None:
    with pytest.raises(EngineAnswerError) as raised:
        to_generation(good()[0], completion, model, 0, who="http://a")
    assert raised.value.field == field and "http://a" in str(raised.value)


def test_interrupted_calls(model: HFModelConfig) -> None:
    request, completion = good(5, 3)
    cut = dataclasses.replace(completion, tokens=[1, 1, 1], finish="abort")
    assert to_generation(request, cut, model, 0, who="x").interrupted
    whole = dataclasses.replace(completion, finish="abort")
    assert not to_generation(request, whole, model, 0, who="x").interrupted, "the stop token was sampled already"
    assert to_generation(request, Completion([], [], "abort"), model, 0, who="x") is None


def test_dense_models_have_no_routes(model: HFModelConfig) -> None:
    request, completion = good()
    found = to_generation(request, dataclasses.replace(completion, routes=None), model, 0, who="x", routes=False)
    assert found.routes is None


def test_arrays_in_json() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.int16).reshape(2, 3))
    text = base64.b64encode(file.getvalue()).decode()
    np.testing.assert_array_equal(decode_array(text), np.arange(6).reshape(2, 3))
    assert decode_array(None) is None
    for bad in ("no base64!", base64.b64encode(file.getvalue()[:-1]).decode(), ""):
        with pytest.raises(EngineAnswerError):
            decode_array(bad)


def test_numpy_prompts_become_plain_integers() -> None:
    request = as_request(np.arange(3, dtype=np.int32), np.int64(4), np.array([7, 5]), False)
    assert json.dumps(dataclasses.asdict(request)) and request.stop_tokens == (5, 7)
