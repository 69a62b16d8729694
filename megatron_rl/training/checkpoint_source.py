"""Checkpoints of a run as HF directories, without building the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from megatron_rl.backend.checkpoint_reader import StoredTensors
from megatron_rl.backend.sequence_outputs import outputs
from megatron_rl.errors import CheckpointError
from megatron_rl.hf.config import HFModelConfig, read_hf_config
from megatron_rl.hf.conversion.conversion import Share
from megatron_rl.hf.conversion.sources import HFSource, Parameter, Source, model_in_order, own_dtype
from megatron_rl.hf.exporter import ExpertStacks
from megatron_rl.hf.inventory import HFTensor
from megatron_rl.hf.names import parse_parameter_name
from megatron_rl.hf.table import KEPT_DTYPE
from megatron_rl.training.checkpoint import MANIFEST, RUN, STATES, faults, newest_complete

Role = Literal["actor", "critic"]
State = Literal["weights", "ewma", "reference"]
_EXPERTS = ".mlp.experts.experts."


class RunSource:
    """Weights of the actor or the critic in a run's checkpoint: whole float32 tensors under Megatron's names.

    Args:
        path: a checkpoint (`iteration_…`), the folder of them, or the run directory; of several the newest whole one.
        role: whose.
        state: `weights` being trained, the `ewma` anchor, or the `reference` policy.
        directory: HF checkpoint whose config.json and tokenizer files go along; None: the one the run started from.

    Raises:
        CheckpointError: the checkpoint is incomplete, lacks the role, the state or a tensor, or is of another model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        role: Role = "actor",
        state: State = "weights",
        directory: str | Path | None = None,
    ) -> None:
        self.path = find_checkpoint(Path(path))
        if reason := faults(self.path, checksums=False):
            raise CheckpointError(
                "checkpoint is not complete", file=self.path, found=reason, expected="every file of its manifest"
            )
        model = json.loads((self.path / RUN).read_text())["config"]["model"]
        started_from = model["critic_path"] or model["path"] if role == "critic" else model["path"]
        self.directory = Path(directory or started_from)
        self._role, self._prefix = role, f"{role}.{state}."
        self._stored = StoredTensors(self.path / STATES)
        self._shapes = self._stored.shapes(self._prefix)
        self._check_state()
        self.config = read_hf_config(self.directory)
        if role == "critic":
            self.config = self.config.as_critic()
        self._check_model()
        self._buffers: HFSource | None = None
        self._keys = {_canonical(key, role): key for key in self._shapes}
        self._check_keys()
        self.stored_dtype: torch.dtype | None = own_dtype(self.directory, "float32")

    def parameters(self) -> list[Parameter]:
        """Every parameter of the model, in its order."""
        return model_in_order(self.config)

    def notes(self) -> list[str]:
        """What is left out: nothing a run trains."""
        return []

    def identity(self) -> dict[str, Any]:
        """The checkpoint's own manifest stands for its bytes."""
        seal = xxhash.xxh3_128((self.path / MANIFEST).read_bytes()).hexdigest()
        return {
            "kind": "run",
            "path": str(self.path.resolve()),
            "manifest": seal,
            "state": self._prefix,
            "hf": str(self.directory.resolve()),
        }

    def dtype(self, tensor: HFTensor) -> torch.dtype:
        """float32."""
        return torch.float32

    def read(self, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
        """(HF name, float32 tensor) of each HF tensor of a parameter."""
        if parameter.canonical in KEPT_DTYPE:
            # A buffer that nothing trains: the run has it from the checkpoint it started from.
            self._buffers = self._buffers or HFSource(self.directory)
            yield from self._buffers.read(parameter)
            return
        key = self._keys[parameter.canonical, parameter.layer]
        of_experts = _EXPERTS in f".{key}"
        experts = range(self._shapes[key][0]) if of_experts and parameter.expert is None else [parameter.expert]
        stacks = ExpertStacks(self.config)
        for expert in experts:
            region = [slice(0, size) for size in self._shapes[key]]
            if expert is not None:
                region[0] = slice(expert, expert + 1)
            full = self._stored.read(self._prefix + key, region)
            yield from stacks.split(
                parameter.canonical, full if expert is None else full[0], layer=parameter.layer, expert=expert
            )

    def release(self) -> None:
        """Unmap the files of the checkpoint the run started from."""
        if self._buffers is not None:
            self._buffers.release()

    def check_bytes(self, share: Share) -> None:
        """Compare this process's part of the checkpoint's files with their checksums.

        Raises:
            CheckpointError: a file differs.
        """
        if reason := faults(self.path, share.index, share.count):
            raise CheckpointError(
                "the checkpoint is damaged", file=self.path, found=reason, expected="the files of its manifest"
            )

    def _check_state(self) -> None:
        if not self._shapes:
            raise CheckpointError(
                "the checkpoint lacks these weights",
                file=self.path,
                field=self._prefix.rstrip("."),
                found="nothing",
                expected=f"one of {[name.rstrip('.') for name in self._stored.prefixes()]}",
                setting="--role or --state",
            )

    def _check_model(self) -> None:
        numbers = json.loads((self.path / STATES / "states.json").read_text())
        recorded = numbers[self._role]["model"]
        for key in ("model_type", "num_layers", "hidden_size", "vocab_size", "num_experts", "tied_embeddings"):
            if recorded.get(key) != getattr(self.config, key):
                raise CheckpointError(
                    "the HF directory is of another model than the checkpoint",
                    file=self.directory,
                    field=key,
                    found=getattr(self.config, key),
                    expected=recorded.get(key),
                    setting="--hf",
                )

    def _check_keys(self) -> None:
        for parameter in self.parameters():
            stored = (parameter.canonical, parameter.layer) in self._keys
            if not stored and parameter.canonical not in KEPT_DTYPE:
                raise CheckpointError(
                    "the checkpoint lacks a tensor",
                    file=self.path,
                    field=f"{parameter.canonical} of layer {parameter.layer}",
                    found=f"{len(self._shapes)} tensors under {self._prefix}",
                    expected=parameter.tensors[0].name,
                )


def _canonical(key: str, role: Role) -> tuple[str, int | None]:
    """A stored key → (canonical name, global layer). Experts are stored stacked, so a key has no expert number."""
    plain = key.replace(_EXPERTS, ".mlp.experts.")
    parsed = parse_parameter_name(plain, value_head=role == "critic")
    return parsed.canonical, parsed.layer


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest whole one in it or in its `checkpoints`.

    Raises:
        CheckpointError: there is none.
    """
    if (path / RUN).is_file():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (found := newest_complete(root).path):
            return found
    raise CheckpointError(
        "no checkpoint here",
        file=path,
        found="neither config.json nor a whole iteration_… directory",
        expected="an HF checkpoint, a run directory, or one checkpoint of a run",
        setting="SOURCE",
    )


def open_source(
    path: str | Path,
    *,
    role: Role = "actor",
    state: State = "weights",
    hf: str | Path | None = None,
    value_head: str | Path | None = None,
    seed: int = 0,
    keep_mtp: bool = False,
) -> Source:
    """An HF checkpoint (a directory with config.json) or a run's. See `HFSource` and `RunSource` for the rest."""
    path = Path(path)
    if (path / "config.json").is_file():
        if role != "actor" or state != "weights" or hf is not None:
            raise CheckpointError(
                "an HF checkpoint has one set of weights",
                file=path,
                found=f"role {role}, state {state}, HF directory {hf}",
                expected="a run or one of its checkpoints for these",
                setting="--role, --state, --hf or SOURCE; a critic from a policy: --value-head",
            )
        return HFSource(path, value_head=value_head, seed=seed, keep_mtp=keep_mtp)
    if value_head is not None:
        raise CheckpointError(
            "a value head is attached to HF checkpoints only",
            file=path,
            found=f"--value-head {value_head}",
            expected="none: a run's critic has its own",
            setting="--role critic, or convert twice",
        )
    return RunSource(path, role=role, state=state, directory=hf)


@dataclass(frozen=True)
class OutputComparison:
    """Megatron's outputs against transformers' on one prompt, both float32."""

    difference: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute output of transformers."""
    same_choice: int
    """Positions where both prefer the same token; of a critic, all."""
    positions: int


def compare_outputs(path: str | Path, tokens: Sequence[int], *, tolerance: float = 1e-3) -> OutputComparison:
    """Run a converted checkpoint through Megatron and through transformers.

    Whether a gate was swapped with an up projection, a router transposed or a rotary base lost shows here only: names,
    shapes and hashes are the same.

    Args:
        path: HF directory of a policy or a critic, small enough for memory in float32.
        tokens: one prompt.
        tolerance: largest difference accepted, relative to the largest output where that exceeds 1.

    Raises:
        CheckpointError: they differ by more.
    """
    found = outputs(str(path), np.asarray(tokens))
    expected = transformers_outputs(path, tokens)
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    if not difference <= tolerance * max(1.0, scale):
        raise CheckpointError(
            "Megatron's outputs differ from transformers'",
            file=path,
            found=f"{difference:.3g} at outputs up to {scale:.3g}",
            expected=f"at most {tolerance:g} of the largest output",
            setting="--tolerance if the model is in order",
        )
    return OutputComparison(difference, scale, same, len(expected))


def transformers_outputs(path: str | Path, tokens: Sequence[int]) -> Tensor:
    """Logits [n, V] or values [n, 1] of one prompt by transformers, float32."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    critic = read_hf_config(path).head == "value"
    kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    # Fused kernels round otherwise.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(path, dtype=torch.float32, **plain).eval()
    with torch.no_grad():
        return model(torch.as_tensor([list(tokens)])).logits[0].float()


def float32_bytes(config: HFModelConfig) -> int:
    """Memory of a model's weights in float32: what bounds the comparison of logits."""
    return sum(4 * prod(tensor.shape) for parameter in model_in_order(config) for tensor in parameter.tensors)
