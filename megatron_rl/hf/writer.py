"""A checkpoint directory, written as a stream of tensors and visible only when complete."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.files import make_durable, replace_directory, sweep, temporary_name
from megatron_rl.hf.audit import Audit, Problem
from megatron_rl.hf.config import HFModelConfig
from megatron_rl.hf.families import ARCHITECTURES
from megatron_rl.hf.inventory import MTP_SETTING, mtp_names
from megatron_rl.hf.json_files import read_json, write_json
from megatron_rl.hf.quantised import open_checkpoint
from megatron_rl.hf.reader import INDEX_FILE, SINGLE_FILE
from megatron_rl.hf.shard_file import Piece, ShardFile, header_room, tensor_bytes

SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)
"""Patterns of files copied from the source checkpoint as they are."""
_WORTH_A_THREAD = 1 << 16
"""Bytes of a tensor below which it is checked sooner than another thread hears of it."""


class StreamingWriter:
    """Writes one HF checkpoint; a context manager that publishes on success and removes everything on an exception::

        with StreamingWriter(target, config, source) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)

    Tensors go straight into shards of up to `max_shard_bytes`, and are checked and hashed by a second thread meanwhile.
    All of it goes to a hidden sibling directory, is fsynced, and takes the target's name by one rename. Replacing an
    existing target renames that away first: a reader may for an instant find neither, never a mixture. What a killed
    process leaves, the next writer of the same target removes (`files.sweep`).

    Args:
        path: target directory; its parent must exist.
        config: what is written, with `head="value"` (`HFModelConfig.as_critic`) for a critic.
        source: directory whose config.json and tokenizer files go along.
        max_shard_bytes: a larger tensor gets a file of its own.
        overwrite: replace an existing checkpoint; a directory that holds anything else is never replaced.

    Raises:
        CheckpointError: the target exists; or, from `write` and on leaving, a tensor is unexpected, duplicate,
            misshapen, non-finite, constant or missing.
    """

    def __init__(
        self,
        path: str | Path,
        config: HFModelConfig,
        source: str | Path,
        *,
        max_shard_bytes: int = 5 * 2**30,
        overwrite: bool = False,
    ) -> None:
        self.path, self.source, self._config = Path(path), Path(source), config
        self._max_bytes = max_shard_bytes
        check_target(self.path, overwrite)
        self._audit = Audit(config)
        self._directory = temporary_name(self.path)
        self.pieces: dict[str, list[Piece]] = {}
        """Weights file → its pieces, once all is written."""
        self._shard: ShardFile | None = None
        self._shards: list[list[str]] = []
        self._digests: dict[str, str] = {}
        self._bytes_by_dtype: Counter[torch.dtype] = Counter()
        self._second = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-check")

    def __enter__(self) -> StreamingWriter:
        sweep(self.path.parent, re.escape(self.path.name))
        self._directory.mkdir()
        self._to_come = self._audit.expected | self._mtp_shapes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._second.shutdown()
            if self._shard is not None:
                self._shard.abandon()
            shutil.rmtree(self._directory, ignore_errors=True)

    def write(self, name: str, tensor: Tensor) -> None:
        """Add one whole tensor under its HF name; its memory may be reused at once."""
        data = tensor_bytes(tensor)
        if len(data) < _WORTH_A_THREAD:
            problems = self._look_at(name, tensor, data)
            self._add(name, tensor, data)
        else:
            looked = self._second.submit(self._look_at, name, tensor, data)
            self._add(name, tensor, data)
            problems = looked.result()
        if problems:
            raise problems[0].error(self.path)

    def _look_at(self, name: str, tensor: Tensor, data: memoryview) -> list[Problem]:
        problems = self._audit.observe(name, tensor)
        self._digests[name] = xxhash.xxh3_64_hexdigest(data)
        return problems

    def _add(self, name: str, tensor: Tensor, data: memoryview) -> None:
        if self._shard is not None and self._shard.size + len(data) > self._max_bytes:
            self._end_shard()
        if self._shard is None:
            file = self._directory / _shard_name(len(self._shards), None)
            self._shard = ShardFile(file, header_room(self._to_come))
        self._shard.add(name, tensor, data)
        self._bytes_by_dtype[tensor.dtype] += len(data)

    def _end_shard(self) -> None:
        if (shard := self._shard) is None:
            return
        self.pieces[shard.path.name] = shard.close_hashed(self._digests)
        self._shard = None
        self._shards.append(shard.names)
        for name in shard.names:
            self._to_come.pop(name, None)

    def _finish(self) -> None:
        self._audit.report().raise_for_problems(self.path)
        self._copy_mtp()
        self._end_shard()
        self._name_shards()
        main_dtype = self._bytes_by_dtype.most_common(1)[0][0]
        write_json(self._directory / "config.json", export_settings(self.source, self._config, main_dtype))
        for file in side_files(self.source):
            shutil.copyfile(file, self._directory / file.name)
        for file in self._directory.iterdir():
            make_durable(file)
        make_durable(self._directory)
        replace_directory(self._directory, self.path)

    def _copy_mtp(self) -> None:
        if self._config.keep_mtp:
            reader = open_checkpoint(self.source)
            for name in mtp_names(self._config, reader.names()):
                tensor = reader.read(name)
                data = tensor_bytes(tensor)
                self._digests[name] = xxhash.xxh3_64_hexdigest(data)
                self._add(name, tensor, data)

    def _mtp_shapes(self) -> dict[str, Sequence[int]]:
        if not self._config.keep_mtp:
            return {}
        reader = open_checkpoint(self.source)
        return {name: reader.shape(name) for name in mtp_names(self._config, reader.names())}

    def _name_shards(self) -> None:
        """Give shards their final names, now that their number is known, and write the index if there are several."""
        count = len(self._shards)
        for i in range(count):
            final = SINGLE_FILE if count == 1 else _shard_name(i, count)
            (self._directory / _shard_name(i, None)).rename(self._directory / final)
            self.pieces[final] = self.pieces.pop(_shard_name(i, None))
        if count > 1:
            weight_map = {name: _shard_name(i, count) for i, names in enumerate(self._shards) for name in names}
            total = sum(self._bytes_by_dtype.values())
            write_json(self._directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def export_settings(source: Path, config: HFModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The source's config.json with the head and the dtype of what is really written."""
    values = read_json(source / "config.json")
    # Weights leave here dequantised.
    values.pop("quantization_config", None)
    heads = ARCHITECTURES[config.model_type]
    values["architectures"] = [name for name, head in heads.items() if head == config.head]
    if config.head == "value":
        # Without the bias switch transformers adds a score.bias that no file holds.
        values |= {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
        values |= {"token_classification_bias": False, "classifier_dropout": 0.0}
    if MTP_SETTING in values and not config.keep_mtp:
        values[MTP_SETTING] = 0
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = str(dtype).removeprefix("torch.")
    return values


def _shard_name(index: int, count: int | None) -> str:
    return f"model-{index + 1:05d}" + (f"-of-{count:05d}" if count else "") + ".safetensors"


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a target that exists, or with `overwrite` one that is no HF checkpoint."""
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(
            "the target exists", file=path, found="a file or directory", expected="nothing", setting="overwrite"
        )
    if not path.is_dir() or (any(path.iterdir()) and not (path / "config.json").exists()):
        raise CheckpointError(
            "refusing to replace what is no checkpoint", file=path, found="no config.json", expected="an HF checkpoint"
        )


def side_files(source: Path) -> Iterator[Path]:
    """Tokenizer and generation files of a checkpoint directory, sorted."""
    files = {file for pattern in SIDE_FILES for file in source.glob(pattern) if file.is_file()}
    yield from sorted(files)
