"""Two engine copies behind one address. Dense, because vLLM's build for CPUs exchanges no tokens between experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.engines.publication import write_publication
from megatron_rl.engines.vllm.engine import ReplicaSetSettings, VllmEngine
from megatron_rl.engines.vllm.http_replica import HttpReplica
from megatron_rl.engines.vllm.server import SERVED_NAME, LocalServer
from megatron_rl.errors import EngineVersionError
from tests.vllm.conftest import VOCAB, options

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
COPIES = (0, 1)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions 0, 1 and 2; the second copy does not load the one in the middle."""
    folder = tmp_path_factory.mktemp("dense")
    return [_write(folder / name, version) for version, name in enumerate(("first", "spoiled", "last"))]


def _write(path: Path, version: int) -> Path:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        model = Qwen3ForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(weight, 1.0, 0.05)
    model.save_pretrained(path)
    write_publication(path, version)
    return path


@pytest.fixture(scope="module")
def server(versions: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Both copies, each in processes of its own."""
    worker = {"worker_extension_cls": "tests.vllm.spoiled_copy.SpoiledCopy"}
    chosen = options(versions[0], "float32", data_parallel=len(COPIES), routes=False, extra=worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with LocalServer(chosen, tmp_path_factory.mktemp("copies") / "server.log") as started:
            yield started


def completion_of(server: LocalServer, copy: int, **body: Any) -> dict[str, Any]:
    """A completion of one engine copy."""
    body = {"model": SERVED_NAME, "prompt": [1, 2, 3], "detokenize": False, "return_token_ids": True} | body
    headers = {"X-data-parallel-rank": str(copy)}
    response = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    (choice,) = response.raise_for_status().json()["choices"]
    return choice


def test_every_copy_is_verified_and_samples_its_own_stream(server: LocalServer, versions: list[Path]) -> None:
    def scores() -> list[Any]:
        return [completion_of(server, copy, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][1:] for copy in COPIES]

    def sampled() -> list[list[int]]:
        engine.reseed(7)
        return [completion_of(server, copy, max_tokens=16, ignore_eos=True)["token_ids"] for copy in COPIES]

    with VllmEngine([HttpReplica(server.url)], versions[0], settings=ReplicaSetSettings(attempts=1)) as engine:
        before, tokens = scores(), sampled()
        assert before[0] == before[1] and tokens[0] != tokens[1] and sampled() == tokens
        with pytest.raises(EngineVersionError, match="engine copy 1 holds other weights.*version 0 serves on"):
            engine.load(versions[1], 1)
        assert engine.version == 0 and scores() == before
        engine.load(versions[2], 2)
        after = scores()
        assert after[0] == after[1] != before[0]
        engine.sleep()
        assert engine.version == 2 and len(engine.generate([[1, 2, 3]], 4, [])[0].tokens) == 4
        assert scores() == after
