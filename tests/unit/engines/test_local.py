"""The embedded engine against plain `transformers`: exact tokens, log-probs of what was sampled, routes used."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from megatron_rl.engines.local import LocalEngine
from megatron_rl.engines.tiny import TinyShape, write_tiny_checkpoint
from megatron_rl.environments.vocabulary import Vocabulary
from megatron_rl.errors import CheckpointError, ConfigError, RolloutError

VOCABULARY = Vocabulary((f"w{i}" for i in range(24)), multiple_of=8)
SHAPE = TinyShape(hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, moe_hidden_size=16, dense_layers=(1,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path, VOCABULARY, SHAPE, seed=3)
    return path


@pytest.fixture(scope="module")
def plain(checkpoint):
    return Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def ragged_prompts(count=7, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 24, n).tolist() for n in rng.integers(1, 20, count)]


@torch.no_grad()
def reference_logprobs(model, tokens, temperature=1.0):
    """One unbatched, uncached forward for every single token."""
    out = []
    for i in range(1, len(tokens)):
        logits = model(input_ids=torch.tensor([tokens[:i]]), use_cache=False).logits[0, -1]
        out.append(float(torch.log_softmax(logits.double() / temperature, -1)[tokens[i]]))
    return np.array(out)


@torch.no_grad()
def reference_routes(model, tokens):
    """What the experts receive as their indices in one plain forward: [L, len(tokens), k]."""
    seen = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: seen.append(args[1].clone()))
        for layer in model.model.layers
        if hasattr(layer.mlp, "experts")
    ]
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ragged_batch_equals_plain_forwards(checkpoint, plain, temperature):
    engine = LocalEngine(checkpoint, temperature=temperature, seed=1)
    prompts = ragged_prompts()
    for prompt, made in zip(prompts, engine.generate(prompts, 6, [5]), strict=True):
        whole = prompt + made.tokens.tolist()
        expected = reference_logprobs(plain, whole, temperature)[len(prompt) - 1 :]
        np.testing.assert_allclose(made.logprobs, expected, atol=3e-6)
        np.testing.assert_array_equal(made.routes, reference_routes(plain, whole[:-1]))
        assert (made.tokens.dtype, made.logprobs.dtype, made.routes.dtype) == (np.int32, np.float32, np.uint8)


def test_captured_routes_are_what_the_experts_got(checkpoint):
    """In the engine's own batched and cached forwards, padding columns included."""
    engine = LocalEngine(checkpoint)
    received, captured = [], []
    for layer in (engine.model.model.layers[i] for i in engine.moe_layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: received.append(args[1].clone()))
    forward = engine._forward
    engine._forward = lambda *args: (forward(*args), captured.extend(t.clone() for t in engine._captured))[0]
    engine.generate(ragged_prompts(), 3, [])
    assert len(received) == 3 * len(engine.moe_layers)
    for got, used in zip(captured, received, strict=True):
        assert torch.equal(got, used)


def test_routes_rows_belong_to_the_moe_layers_only(checkpoint):
    engine = LocalEngine(checkpoint)
    (made,) = engine.generate([[1, 2, 3]], 2, [])
    assert engine.moe_layers == (0, 2)
    assert made.routes.shape == (2, 4, 2)
    assert engine.header("abc").fingerprint.moe_layers == (0, 2)


def test_stop_token_ends_its_row_only_and_is_kept(checkpoint):
    engine = LocalEngine(checkpoint, seed=2)
    prompts = ragged_prompts(16)
    stops = list(range(0, 24, 3))
    made = engine.generate(prompts, 5, stops)
    for one in made:
        assert not set(one.tokens[:-1].tolist()) & set(stops)
        assert one.tokens[-1] in stops or len(one.tokens) == 5
    assert len({len(one.tokens) for one in made}) > 2


def continue_with(engine, observation, turns=4):
    prompts = ragged_prompts(5, seed=4)
    rows = []
    for turn in range(turns):
        made = engine.generate(prompts, 3, [7], greedy=True)
        rows.append([(one.tokens.tolist(), one.logprobs, one.routes) for one in made])
        prompts = [
            prompt + one.tokens.tolist() + observation[: 1 + (turn + i) % 4]
            for i, (prompt, one) in enumerate(zip(prompts, made, strict=True))
        ]
    return rows, prompts


def test_kept_prefixes_change_nothing(checkpoint):
    kept, final = continue_with(LocalEngine(checkpoint), [9, 8, 11, 4])
    fresh, expected = continue_with(LocalEngine(checkpoint, prefix_tokens=0), [9, 8, 11, 4])
    assert final == expected
    for kept_turn, fresh_turn in zip(kept, fresh, strict=True):
        for (tokens, logprobs, routes), (tokens_, logprobs_, routes_) in zip(kept_turn, fresh_turn, strict=True):
            assert tokens == tokens_
            np.testing.assert_allclose(logprobs, logprobs_, atol=3e-6)
            np.testing.assert_array_equal(routes, routes_)


def test_kept_prefixes_are_used_and_bounded(checkpoint):
    engine = LocalEngine(checkpoint)
    blocks = []
    forward = engine._forward
    engine._forward = lambda batch, ids, valid: (blocks.append(ids.shape[1]), forward(batch, ids, valid))[1]
    (made,) = engine.generate([[1] * 30], 1, [])
    engine.generate([[1] * 30 + made.tokens.tolist() + [2, 3]], 1, [])
    assert blocks == [30, 3]
    small = LocalEngine(checkpoint, prefix_tokens=40)
    small.generate([[i] * 15 for i in range(4)], 1, [])
    assert small._prefixes._size == 30 == sum(entry.kv.shape[2] for entry in small._prefixes._entries.values())


def test_same_prompt_again_and_shared_prompts(checkpoint):
    """A prompt that equals a stored prefix must still be fed one token; equal prompts may share a stored prefix."""
    engine = LocalEngine(checkpoint)
    first = engine.generate([[1, 2, 3, 4]] * 3, 1, [], greedy=True)
    again = engine.generate([[1, 2, 3, 4]] * 3, 1, [], greedy=True)
    for one, other in zip(first, again, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_array_equal(one.routes, other.routes)


def test_score_is_the_plain_forward(checkpoint, plain):
    engine = LocalEngine(checkpoint, temperature=0.7)
    tokens = ragged_prompts(1)[0] + [3, 1, 4]
    scored = engine.score(tokens)
    assert scored[0] == 0.0
    np.testing.assert_allclose(scored[1:], reference_logprobs(plain, tokens, 0.7), atol=3e-6)


def test_samples_follow_the_tempered_distribution(checkpoint, plain):
    """Chi-square of 4096 first tokens over 24 ids: 60 is exceeded with probability 4e-5."""
    engine = LocalEngine(checkpoint, temperature=0.5, seed=0)
    made = engine.generate([[3, 1, 2]] * 4096, 1, [])
    counts = np.bincount([int(one.tokens[0]) for one in made], minlength=24)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[3, 1, 2]])).logits[0, -1]
    expected = 4096 * torch.softmax(logits.double() / 0.5, -1).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 60
    untempered = 4096 * torch.softmax(logits.double(), -1).numpy()
    assert ((counts - untempered) ** 2 / untempered).sum() > 60


def test_greedy_takes_the_most_likely_and_seeds_repeat(checkpoint, plain):
    prompts = ragged_prompts()
    made = LocalEngine(checkpoint).generate(prompts, 1, [], greedy=True)
    for prompt, one in zip(prompts, made, strict=True):
        with torch.no_grad():
            assert one.tokens[0] == plain(input_ids=torch.tensor([prompt])).logits[0, -1].argmax()
    sampled = [
        [one.tokens.tolist() for one in LocalEngine(checkpoint, seed=s).generate(prompts, 4, [])] for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_stream_samples_the_same_whatever_shares_its_batch(checkpoint):
    prompts, names = ragged_prompts(12), [5, 2**64 - 1, *range(100, 110)]
    together = LocalEngine(checkpoint, seed=3).generate(prompts, 6, [7], streams=names)
    engine = LocalEngine(checkpoint, seed=3)
    for part in (slice(9, 12), slice(0, 4), slice(4, 9)):
        for one, other in zip(engine.generate(prompts[part], 6, [7], streams=names[part]), together[part], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=3e-6)
    # An action in two calls is the action in one: positions count, not calls.
    whole = next(i for i, one in enumerate(together) if len(one.tokens) == 6)
    begun = prompts[whole] + together[whole].tokens[:2].tolist()
    (rest,) = engine.generate([begun], 4, [7], streams=[names[whole]])
    assert rest.tokens.tolist() == together[whole].tokens[2:].tolist()


def test_streams_and_positions_are_independent(checkpoint):
    """Correlation of 4096 uniforms with their neighbours by name, by position and by seed: 0.0625 is 4 deviations."""
    engine, rows = LocalEngine(checkpoint), [np.zeros(3, np.int32)] * 4097

    def drawn(seed: int, first: int, step: int) -> np.ndarray:
        engine.reseed(seed)
        return engine._uniform(range(first, first + 4097), rows, step).numpy()

    base = drawn(0, 0, 0)
    assert abs(base.mean() - 0.5) < 0.02 and base.min() >= 0 and base.max() < 1
    for other in (base[1:], drawn(0, 0, 1)[:-1], drawn(1, 0, 0)[:-1]):
        assert abs(np.corrcoef(base[:-1], other)[0, 1]) < 0.0625


def test_an_impossible_token_is_never_chosen(checkpoint):
    engine = LocalEngine(checkpoint)
    logits = torch.full((3, 24), -torch.inf)
    logits[:, [4, 9]] = 0.0
    ends = torch.tensor([0.0, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    chosen, logprobs = engine._choose(logits, ends)
    assert chosen.tolist() == [4, 9, 9]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_bfloat16_logprobs_are_formed_in_float32(checkpoint):
    engine = LocalEngine(checkpoint, dtype=torch.bfloat16)
    made = engine.generate([[1, 2, 3]] * 64, 1, [])
    logprobs = np.array([one.logprobs[0] for one in made])
    assert logprobs.dtype == np.float32
    assert (torch.tensor(logprobs).bfloat16().float().numpy() != logprobs).any()
    tokens = np.array([one.tokens[0] for one in made])
    mass = np.exp([logprobs[tokens == t][0] for t in np.unique(tokens)]).sum()
    assert mass <= 1 + 1e-5


def test_load_replaces_weights_version_and_prefixes(checkpoint, tmp_path):
    write_tiny_checkpoint(tmp_path, VOCABULARY, SHAPE, seed=4)
    engine = LocalEngine(checkpoint)
    prompt = list(range(10))
    (old,) = engine.generate([prompt], 1, [], greedy=True)
    engine.load(tmp_path, 5)
    (new,) = engine.generate([prompt + [2]], 1, [], greedy=True)
    (expected,) = LocalEngine(tmp_path).generate([prompt + [2]], 1, [], greedy=True)
    assert (old.version, new.version) == (0, 5)
    np.testing.assert_array_equal(new.logprobs, expected.logprobs)
    np.testing.assert_array_equal(new.routes, expected.routes)


def test_load_refuses_missing_and_left_over_tensors_and_keeps_the_old(checkpoint, tmp_path):
    engine = LocalEngine(checkpoint)
    before = engine.score([1, 2, 3])
    write_tiny_checkpoint(tmp_path, VOCABULARY, SHAPE)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.layers.2.mlp.gate.weight"):
        engine.load(tmp_path, 1)
    tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(8, 32)
    tensors["stray.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="stray.weight"):
        engine.load(tmp_path, 1)
    assert engine.version == 0
    np.testing.assert_array_equal(engine.score([1, 2, 3]), before)


def test_tied_embeddings_are_not_a_missing_tensor(tmp_path):
    write_tiny_checkpoint(tmp_path, VOCABULARY, replace(SHAPE, tie_embeddings=True))
    model = LocalEngine(tmp_path).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_more_than_255_experts_need_two_bytes(tmp_path):
    write_tiny_checkpoint(tmp_path, VOCABULARY, replace(SHAPE, num_experts=300, moe_hidden_size=4))
    made = LocalEngine(tmp_path).generate([list(range(24))], 1, [])
    assert made[0].routes.dtype == np.uint16
    assert made[0].routes.max() > 255


def test_other_models_and_absent_files_are_named(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="nothing_here"):
        LocalEngine(tmp_path / "nothing_here")
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="llama"):
        LocalEngine(tmp_path)


@pytest.mark.parametrize("prompt", [[], [-1], [24], [1] * 511])
def test_bad_prompts_are_refused_with_their_row(checkpoint, prompt):
    with pytest.raises(RolloutError, match="row=1"):
        LocalEngine(checkpoint).generate([[1], prompt], 4, [])


def test_bad_settings_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="temperature"):
        LocalEngine(checkpoint, temperature=0.0)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        LocalEngine(checkpoint).generate([[1]], 0, [])


def test_tiny_checkpoint_repeats_and_leaves_the_random_state(tmp_path):
    torch.manual_seed(11)
    state = torch.get_rng_state()
    for name in ("a", "b"):
        count = write_tiny_checkpoint(tmp_path / name, VOCABULARY, SHAPE, seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("a", "b")]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert count == sum(tensor.numel() for tensor in files[0].values())
    assert Vocabulary.load(tmp_path / "a" / "vocabulary.json").fingerprint == VOCABULARY.fingerprint
