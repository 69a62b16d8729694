"""The bias of a token classifier's head in transformers; a critic's head has none: value = ⟨w, hidden⟩."""

from __future__ import annotations

from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.inventory import rule_for
from megatron_rl.hf.reader import SafetensorsReader


def is_zero_head_bias(reader: SafetensorsReader, config: HFModelConfig, name: str) -> bool:
    """Whether a tensor is the value head's bias and changes nothing."""
    return name == _bias_name(config) and name in reader and not bool(reader.read(name).any())


def check_head_bias(reader: SafetensorsReader, config: HFModelConfig) -> None:
    """Refuse a critic whose head adds a bias: dropping it would shift every value.

    Raises:
        CheckpointError: `score.bias` is stored and is not zero.
    """
    name = _bias_name(config)
    if name is not None and name in reader and not is_zero_head_bias(reader, config, name):
        raise CheckpointError(
            "a value head with a bias",
            file=reader.file(name),
            field=name,
            found=reader.read(name).tolist(),
            expected="no bias, or zero",
            setting="train the classifier with token_classification_bias=false",
        )


def _bias_name(config: HFModelConfig) -> str | None:
    if config.head != "value":
        return None
    return rule_for(config, "value_head.weight").sources[0].name.removesuffix("weight") + "bias"
