"""What rank processes do with a checkpoint: import it into a live Megatron model, read, train, export; and what
transformers makes of the same checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

READINGS = 4e-6
"""Largest accepted difference of a reading from transformers' in float32, nats: eight units in the last place of a
number near 4. It is not the same in every run (one case: 1.2e-6 as a rule, 2.1e-6 once); conversion faults make 1e-4
and more."""
SEQUENCES, LENGTH = 4, 17


def tokens(vocab: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab, (SEQUENCES, LENGTH)).astype(np.int32)


def build(path: Path, parallel: dict[str, Any], role: str = "policy"):
    """A live model whose every tensor is NaN before the import."""
    from megatron_rl.backend import topology
    from megatron_rl.backend.model import build_model, transformer_config
    from megatron_rl.backend.parameters import stored_parameters
    from megatron_rl.backend.weights import import_hf
    from megatron_rl.config import ParallelConfig, PerformanceConfig
    from megatron_rl.hf.config import read_hf_config

    layout = ParallelConfig(**parallel)
    place = topology.initialize(layout, seed=1)
    source = read_hf_config(path)
    wanted = source.as_critic() if role == "value" else source
    model = build_model(wanted, transformer_config(wanted, layout, PerformanceConfig(), torch.float32), place, role)
    with torch.no_grad():
        for stored in stored_parameters(model):
            stored.tensor.fill_(float("nan"))
    import_hf(model, str(path), source, head_seed=3)
    return model


@dataclass
class Outcome:
    """What a layout made of a checkpoint."""

    readings: torch.Tensor
    """float32 [2, SEQUENCES, LENGTH - 1]; a critic gives one row."""
    gradients: dict[str, torch.Tensor]
    """HF name → gradient of the mean negative log-prob, on rank 0."""


def through_megatron(path: Path, target: Path, parallel: dict[str, Any], role: str = "policy", gradients: bool = True):
    """Import, read, export to `target`, and take gradients."""
    import torch.distributed as dist

    from megatron_rl.backend.probe import next_token_readings
    from megatron_rl.training.weights import write_hf

    model = build(path, parallel | {"distributed_optimizer": False}, role)
    readings = next_token_readings(model, tokens(model.hf.vocab_size))
    write_hf(model, target, path)
    found = exported_gradients(model) if gradients else {}
    return Outcome(readings, found if dist.get_rank() == 0 else {})


def exported_gradients(model, source=None) -> dict[str, torch.Tensor]:
    """Gradients of the mean negative log-prob, exported as weights are."""
    from megatron_rl.backend.optimizer import build_optimizer
    from megatron_rl.backend.parameters import local_parameters
    from megatron_rl.backend.probe import probe
    from megatron_rl.backend.step import Readout, train
    from megatron_rl.backend.weights import export_hf
    from megatron_rl.config import OptimizerConfig

    build_optimizer(model, OptimizerConfig())
    cut = probe(model, tokens(model.hf.vocab_size), source=source)

    def loss(slots, readings):
        return -readings[0].sum() / (SEQUENCES * (LENGTH - 1)), readings.new_zeros(1, dtype=torch.float64)

    train(model, cut.parts, cut.plan.length, Readout(), loss)
    for local in local_parameters(model):
        local.tensor.data = local.tensor.main_grad.clone()
    return {name: tensor.clone() for name, tensor in export_hf(model)}


def native_routes(path: Path) -> np.ndarray:
    """uint8 [SEQUENCES, L, LENGTH - 1, k]: experts the model itself chooses, recorded on one rank."""
    from megatron_rl.backend.probe import probe
    from megatron_rl.backend.step import Readout, score
    from megatron_rl.batching import build_layout

    model = build(path, {})
    cut = probe(model, tokens(model.hf.vocab_size), budget=SEQUENCES * LENGTH)
    score(model, cut.parts, cut.plan.length, Readout(), record=True)
    chosen = np.stack([handle.recorded.numpy() for handle in model.registry.handles]).astype(np.uint8)
    layout = build_layout(cut.stream, cut.plan.assignment[0][0], length=cut.plan.length, cp=1, tp=1)
    start = dict(zip(layout.rows, layout.cu_seqlens, strict=False))
    return np.stack([chosen[:, start[row] : start[row] + LENGTH - 1] for row in range(SEQUENCES)])


@dataclass
class Replayed:
    """One pass under given routes."""

    readings: torch.Tensor
    agreed: tuple[float, float]
    """(token, choice) pairs the router would have chosen itself, and all of them, on this rank."""
    gradients: dict[str, torch.Tensor]


def replay(path: Path, parallel: dict[str, Any], routes: dict[str, np.ndarray | None]) -> dict[str, Replayed]:
    """Readings and gradients of one live model under each of several sets of routes (None: native)."""
    from megatron_rl.backend.probe import next_token_readings

    passes = {}
    for name, ids in routes.items():
        model = build(path, parallel | {"distributed_optimizer": False})
        source = None if ids is None else lambda row, layers, rows, ids=ids: ids[row][np.ix_(layers, rows)]
        readings = next_token_readings(model, tokens(model.hf.vocab_size), source)
        agreed = torch.stack([handle.agreed for handle in model.registry.handles]).sum(0).tolist()
        passes[name] = Replayed(readings, tuple(agreed), exported_gradients(model, source))
        reset_layout()
    return passes


def reset_layout() -> None:
    """Forget the layout's groups, so that the next model may be built under one of its own."""
    from tests.dist.pool import reset_megatron

    reset_megatron()


def save(path: Path, parallel: dict[str, Any], checkpoint: Path) -> None:
    """Save a model, freshly imported, as a training checkpoint."""
    import torch.distributed as dist

    from megatron_rl.backend.optimizer import build_optimizer
    from megatron_rl.backend.sharded_checkpoint import ModelStates, save_states
    from megatron_rl.config import OptimizerConfig

    optimizer = build_optimizer(build(path, parallel), OptimizerConfig())
    if dist.get_rank() == 0:
        checkpoint.mkdir()
    dist.barrier()
    save_states(checkpoint, {"actor": ModelStates(optimizer)})


def load(path: Path, parallel: dict[str, Any], checkpoint: Path) -> list[str]:
    """Names of tensors that a training checkpoint, loaded over a model whose weights were erased, does not restore."""
    from megatron_rl.backend.optimizer import build_optimizer
    from megatron_rl.backend.parameters import local_parameters
    from megatron_rl.backend.sharded_checkpoint import ModelStates, load_states
    from megatron_rl.backend.weights import export_hf
    from megatron_rl.config import OptimizerConfig

    model = build(path, parallel)
    expected = {name: tensor.clone() for name, tensor in export_hf(model)}
    optimizer = build_optimizer(model, OptimizerConfig())
    with torch.no_grad():
        for local in local_parameters(model):
            local.tensor.fill_(float("nan"))
    load_states(checkpoint, {"actor": ModelStates(optimizer)})
    return [name for name, tensor in export_hf(model) if not torch.equal(tensor, expected[name])]


def transformers_gradients(path: Path, target: Path) -> Path:
    """A checkpoint that holds gradients of the mean negative log-prob in place of weights."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain)
    ids = torch.as_tensor(tokens(model.config.vocab_size).astype(np.int64))
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for weight in model.parameters():
        weight.data = weight.grad
    model.save_pretrained(target)
    return target


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def different_tensors(found: Path, expected: Path) -> list[str]:
    """Names that one of two checkpoints lacks, or whose bits differ."""
    got, want = tensors(found), tensors(expected)
    return sorted(
        name for name in got.keys() | want.keys() if name not in got or name not in want or not same(got, want, name)
    )


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], name: str) -> bool:
    return got[name].dtype == want[name].dtype and torch.equal(got[name], want[name])


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest |difference| of any entry of any tensor's gradient, and which tensor it is in. Largest entries are ~1."""
    names = [name for name in expected if "e_score_correction_bias" not in name]
    errors = {name: float((found[name] - expected[name]).abs().max()) for name in names}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst
