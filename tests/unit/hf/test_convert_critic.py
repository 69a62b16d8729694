"""Critics out of policies and of other critics, as transformers and this package read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, Qwen3MoeForTokenClassification

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.conversion.conversion import convert
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.conversion.sources import HFSource
from megatron_rl.hf.quantised import open_checkpoint
from megatron_rl.hf.value_head import check_head_bias
from tests.unit.hf.checkpoints import Layout, edit_config, edit_tensors, round_trip, tensors_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def critic(source: Path, target: Path, head: str | Path | None, **options) -> Path:
    opened = HFSource(source, value_head=head, **options)
    convert(opened, target, make_plan(opened))
    return target


def values_by_hand(path: Path, backbone: Path) -> torch.Tensor:
    """⟨w, hidden⟩ with the hidden states of the policy the critic came from."""
    from transformers import AutoModel

    plain = {"attn_implementation": "eager", "dtype": torch.float32}
    hidden = AutoModel.from_pretrained(backbone, **plain).eval()(TOKENS).last_hidden_state
    return hidden @ tensors_of(path)["score.weight"].float().T


@pytest.mark.parametrize("kind", [AutoModelForTokenClassification, Qwen3MoeForTokenClassification])
@pytest.mark.parametrize("head", ["zero", "random"])
def test_transformers_loads_the_critic_and_its_values(checkpoint, tmp_path, kind, head) -> None:
    source = checkpoint("plain")
    path = critic(source, tmp_path / "critic", head)
    plain = {"attn_implementation": "eager", "dtype": torch.float32}
    model, report = kind.from_pretrained(path, output_loading_info=True, **plain)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        found, expected = model.eval()(TOKENS).logits, values_by_hand(path, source)
    assert found.shape == (1, 8, 1) and (found - expected).abs().max() <= 1e-5
    assert bool(expected.any()) == (head == "random")
    assert model.config.num_labels == 1 and model.config.id2label == {0: "value"}


def test_our_import_reloads_it_exactly_and_an_export_repeats_it(checkpoint, tmp_path) -> None:
    source = checkpoint("plain")
    path = critic(source, tmp_path / "critic", "random", seed=5)
    config = read_hf_config(path)
    assert config.head == "value" and config == read_hf_config(source).as_critic()
    stored = tensors_of(path)
    again = dict(round_trip(open_checkpoint(path), config, Layout(tp=2, ep=2)))
    assert again.keys() == stored.keys() and all(torch.equal(again[n], stored[n]) for n in stored)
    policy = tensors_of(source)
    assert stored.keys() == (policy.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert all(torch.equal(stored[n], policy[n]) for n in policy.keys() & stored.keys())
    copied = tensors_of(critic(path, tmp_path / "copy", None))
    assert all(torch.equal(copied[n], stored[n]) for n in stored)


def test_a_random_head_follows_from_its_seed(checkpoint, tmp_path) -> None:
    heads = [tensors_of(critic(checkpoint("plain"), tmp_path / str(i), "random", seed=s))["score.weight"]
             for i, s in enumerate((1, 1, 2))]  # fmt: skip
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std() * 32**0.5 == pytest.approx(1, abs=0.4)


def test_a_trained_head_comes_from_another_checkpoint(checkpoint, tmp_path) -> None:
    trained = critic(checkpoint("plain"), tmp_path / "trained", "random", seed=9)
    for source, backbone in ((checkpoint("dense_layers"), checkpoint("dense_layers")), (trained, trained)):
        target = critic(source, tmp_path / f"from {source.name}", trained)
        found = tensors_of(target)
        assert torch.equal(found["score.weight"], tensors_of(trained)["score.weight"])
        norm = "model.layers.0.input_layernorm.weight"
        assert torch.equal(found[norm], tensors_of(backbone)[norm])


def test_a_policy_is_no_source_of_a_head_and_a_critic_makes_no_policy(checkpoint, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no value head for this model"):
        HFSource(checkpoint("plain"), value_head=checkpoint("plain"))
    path = critic(checkpoint("plain"), tmp_path / "critic", "zero")
    edit_config(path, architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(CheckpointError, match="missing"):
        HFSource(path)


def test_a_bias_is_dropped_when_it_is_zero_and_refused_otherwise(checkpoint, tmp_path) -> None:
    path = critic(checkpoint("plain"), tmp_path / "critic", "random")
    edit_tensors(path, lambda tensors: tensors.update({"score.bias": torch.zeros(1)}))
    reader, config = open_checkpoint(path), read_hf_config(path)
    check_head_bias(reader, config)
    assert audit_checkpoint(reader, config).problems == ()
    assert "score.bias" not in tensors_of(critic(path, tmp_path / "again", None))
    biased = shutil.copytree(path, tmp_path / "biased")
    edit_tensors(biased, lambda tensors: tensors["score.bias"].fill_(0.3))
    with pytest.raises(CheckpointError, match="bias") as caught:
        check_head_bias(open_checkpoint(biased), config)
    assert caught.value.field == "score.bias"
    with pytest.raises(CheckpointError, match=r"score\.bias"):
        HFSource(biased)
