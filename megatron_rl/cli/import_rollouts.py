"""The command `megatron-rl import`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megatron_rl.environments.codecs import load_codec
from megatron_rl.environments.vocabulary import VOCABULARY_FILE, Vocabulary
from megatron_rl.errors import ConfigError, RolloutError
from megatron_rl.hf.config import read_hf_config
from megatron_rl.rollouts.interop.dumps import DumpFormat, ImportOptions, import_dumps
from megatron_rl.rollouts.schema import ModelFingerprint, RolloutHeader, SamplingTruth


def run_import(
    files: list[Path],
    model: Path,
    out: Path,
    dump_format: DumpFormat,
    skip_bad: bool,
    console: Console | None = None,
    **asked: Any,
) -> int:
    """Import dumps and print what became of them; see the command for the arguments.

    Returns:
        Exit code: 0 if shards were written.

    Raises:
        ConfigError: an unknown format, or no tokenizer to take a fingerprint of.
        CheckpointError: the model's configuration is unreadable.
        RolloutError: nothing can be imported, or the output exists.
    """
    if dump_format not in ("auto", "slime", "vllm"):
        raise ConfigError("unknown format", found=dump_format, expected="auto, slime or vllm", setting="--format")
    console = console or Console()
    faults: list[RolloutError] = []
    options = import_options(model, **asked)
    shards = import_dumps(files, out, options, dump_format, faults, partial=skip_bad)
    for fault in faults:
        console.print(Text(str(fault), style="red"), soft_wrap=True)
    rows, tokens = sum(shard.rows for shard in shards), sum(shard.tokens for shard in shards)
    console.print(f"{rows} trajectories, {tokens} tokens, {len(shards)} shards; {len(faults)} bad records")
    return 0 if shards else 1


def import_options(
    model: Path,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    logprobs: Literal["processed", "raw"],
    version: int | None,
    reward_key: str | None,
    missing_reward: float | None,
    tokenizer_hash: str | None,
) -> ImportOptions:
    """What the dump does not say, from the model's directory and the command line."""
    if logprobs not in ("processed", "raw"):
        raise ConfigError("unknown log-probs", found=logprobs, expected="processed or raw", setting="--logprobs")
    hf = read_hf_config(model)
    fingerprint = ModelFingerprint.of(hf, tokenizer_hash or _fingerprint(model))
    header = RolloutHeader(fingerprint, SamplingTruth(temperature, top_p, top_k, logprobs), engine="import")
    return ImportOptions(header, hf.num_layers, version, reward_key, missing_reward)


def _fingerprint(model: Path) -> str:
    if (model / VOCABULARY_FILE).is_file():
        return Vocabulary.load(model / VOCABULARY_FILE).fingerprint
    # Without any of its files transformers may still make up a tokenizer, an empty one.
    if not [*model.glob("tokenizer*"), *model.glob("vocab*")]:
        raise ConfigError(
            "no tokenizer to take a fingerprint of", file=model, expected="tokenizer files", setting="--tokenizer-hash"
        )
    return load_codec(model).vocabulary.fingerprint
