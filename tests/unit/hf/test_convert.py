"""Conversions of HF checkpoints: values, files, hashes, resuming, several processes, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.errors import CheckpointError, LaunchError
from megatron_rl.hf.ahead import ahead
from megatron_rl.hf.audit import audit_checkpoint
from megatron_rl.hf.config import read_hf_config
from megatron_rl.hf.conversion import shards
from megatron_rl.hf.conversion.conversion import Share, convert
from megatron_rl.hf.conversion.manifest import MANIFEST, read_manifest
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.conversion.shards import tensor_hash
from megatron_rl.hf.conversion.sources import HFSource
from megatron_rl.hf.conversion.verify import check, verify
from megatron_rl.hf.reader import INDEX_FILE, SafetensorsReader
from tests.unit.hf.checkpoints import edit_config, edit_tensors, make_checkpoint, make_model, tensors_of

ROOT = Path(__file__).resolve().parents[3]
ROUTER = "model.layers.1.mlp.gate.weight"
SMALL = 60_000
"""Bytes of a file, so that the checkpoint needs several."""


def run(source: Path, target: Path, *, dtype=None, shard=SMALL, **options):
    opened = HFSource(source)
    return convert(opened, target, make_plan(opened, dtype=dtype, max_shard_bytes=shard), **options)


def hidden(target: Path) -> list[Path]:
    return [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]


@pytest.mark.parametrize("variant", ["plain", "dense_layers", "sparse_step"])
@pytest.mark.parametrize("shard", [1, SMALL, 2**30])
def test_every_tensor_arrives_bit_for_bit_in_files_of_the_size_asked_for(checkpoint, tmp_path, variant, shard) -> None:
    source, target = checkpoint(variant), tmp_path / "out"
    outcome = run(source, target, shard=shard)
    stored, written = tensors_of(source), tensors_of(target)
    assert written.keys() == stored.keys() and all(torch.equal(stored[n], written[n]) for n in stored)
    files = sorted(target.glob("*.safetensors"))
    assert [file.name for file in files] == outcome.written and (target / INDEX_FILE).exists() == (len(files) > 1)
    assert read_hf_config(target) == read_hf_config(source) and not hidden(target)
    assert audit_checkpoint(SafetensorsReader(target), read_hf_config(target)).problems == ()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    # A parameter is at most three tensors: only one of them alone may exceed the limit.
    for file in files:
        data = sum(value.nbytes for value in load_file(file).values())
        assert data <= shard or len({name.rsplit(".", 2)[0] for name in load_file(file)}) == 1


def test_stacked_experts_are_written_one_by_one(tmp_path) -> None:
    make_model().save_pretrained(tmp_path / "stacked", save_original_format=False)
    make_model().save_pretrained(tmp_path / "plain")
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path / "stacked"))
    run(tmp_path / "stacked", tmp_path / "out")
    stored, written = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "out")
    assert written.keys() == stored.keys() and all(torch.equal(stored[n], written[n]) for n in stored)


def test_another_dtype_rounds_once_and_is_recorded(checkpoint, tmp_path) -> None:
    source = checkpoint("plain")
    run(source, tmp_path / "out", dtype=torch.bfloat16)
    stored, written = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(stored[n].bfloat16(), written[n]) for n in stored)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mixed_dtypes_stay_and_lie_at_multiples_of_their_size(tmp_path) -> None:
    path = make_checkpoint(tmp_path / "odd", hidden_size=31)
    edit_tensors(path, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if "mlp.gate" not in n}))
    run(path, tmp_path / "out")
    stored, written = tensors_of(path), tensors_of(tmp_path / "out")
    assert {value.dtype for value in stored.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(stored[n], written[n]) and stored[n].dtype == written[n].dtype for n in stored)
    for tensor in make_plan(HFSource(path), max_shard_bytes=SMALL).tensors():
        assert tensor.start % tensor.dtype.itemsize == 0, tensor


def test_a_value_that_the_dtype_cannot_hold_is_named(copy, tmp_path) -> None:
    edit_tensors(copy, lambda tensors: tensors[ROUTER].__setitem__((2, 3), 1e6))
    with pytest.raises(CheckpointError, match="non_finite") as caught:
        run(copy, tmp_path / "out", dtype=torch.float16)
    assert caught.value.field == ROUTER and not (tmp_path / "out").exists()


def test_the_manifest_hashes_every_tensor_and_file(checkpoint, tmp_path) -> None:
    run(checkpoint("plain"), tmp_path / "out")
    manifest, written = read_manifest(tmp_path / "out"), tensors_of(tmp_path / "out")
    assert manifest.tensors.keys() == written.keys()
    for name, entry in manifest.tensors.items():
        assert entry["xxh3_128"] == tensor_hash(written[name]) and entry["shape"] == list(written[name].shape)
        with safe_open(tmp_path / "out" / entry["file"], "pt") as file:
            assert name in file.keys()  # noqa: SIM118  (not a mapping)
    others = {p.name for p in (tmp_path / "out").iterdir()} - {e["file"] for e in manifest.tensors.values()}
    assert manifest.files.keys() == others - {MANIFEST}


def test_the_same_command_again_does_nothing_and_another_is_refused(checkpoint, tmp_path) -> None:
    source, target = checkpoint("plain"), tmp_path / "out"
    run(source, target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert run(source, target).complete_before
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    with pytest.raises(CheckpointError, match="the target exists"):
        run(source, target, dtype=torch.bfloat16)
    run(source, target, dtype=torch.bfloat16, overwrite=True)
    assert tensors_of(target)[ROUTER].dtype == torch.bfloat16 and not hidden(target)


def test_a_directory_that_is_no_checkpoint_is_never_replaced(checkpoint, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(checkpoint("plain"), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.conversion.conversion import convert
from megatron_rl.hf.conversion.sources import HFSource
from megatron_rl.hf.shard_file import ShardFile
left, original = int(sys.argv[3]), ShardFile.append
def dying(file, name, dtype, shape, data, digest):
    global left
    left -= 1
    if not left:
        original(file, name, dtype, shape, data[: len(data) // 2], digest)
        os.kill(os.getpid(), signal.SIGKILL)
    original(file, name, dtype, shape, data, digest)
ShardFile.append = dying
source = HFSource(sys.argv[1])
convert(source, Path(sys.argv[2]), make_plan(source, max_shard_bytes=int(sys.argv[4])))
"""


def test_a_killed_conversion_continues_and_damaged_files_are_written_anew(checkpoint, tmp_path) -> None:
    source, target = checkpoint("plain"), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(target), "90", str(SMALL)]
    died = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert died.returncode == -signal.SIGKILL and not target.exists()
    (work,) = (path for path in hidden(target) if ".hashes." not in path.name)
    finished = sorted(path.name for path in work.glob("*.safetensors"))
    assert len(finished) > 2 and len(list(work.glob("*.tmp"))) == 1
    times = {name: (work / name).stat().st_mtime_ns for name in finished}
    data = bytearray((work / finished[1]).read_bytes())
    data[-5] ^= 1
    (work / finished[1]).write_bytes(data)
    (work / finished[2]).write_bytes((work / finished[2]).read_bytes()[:-1])
    outcome = run(source, target)
    assert outcome.kept == [finished[0], *finished[3:]] and outcome.replaced == finished[1:3]
    assert all((target / name).stat().st_mtime_ns == times[name] for name in outcome.kept)
    stored, written = tensors_of(source), tensors_of(target)
    assert written.keys() == stored.keys() and all(torch.equal(stored[n], written[n]) for n in stored)
    assert not hidden(target)


KILLED_AT_A_RENAME = """
import os, sys
from pathlib import Path
import torch
from megatron_rl.hf.conversion.output_files import make_plan
from megatron_rl.hf.conversion.conversion import convert
from megatron_rl.hf.conversion.sources import HFSource
left, real = int(sys.argv[3]), os.rename
def dying(old, new):
    global left
    left -= Path(new).parent == Path(sys.argv[2]).parent
    if not left:
        os._exit(7)
    real(old, new)
os.rename = dying
source = HFSource(sys.argv[1])
plan = make_plan(source, dtype=torch.bfloat16, max_shard_bytes=int(sys.argv[4]))
convert(source, Path(sys.argv[2]), plan, overwrite=True)
"""


@pytest.mark.parametrize("step", [1, 2])
def test_killed_while_it_replaces_the_same_command_finishes(checkpoint, tmp_path, step) -> None:
    source, target = checkpoint("plain"), tmp_path / "out"
    run(source, target)
    command = [sys.executable, "-c", KILLED_AT_A_RENAME, str(source), str(target), str(step), str(SMALL)]
    died = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert died.returncode == 7 and target.exists() == (step == 1)
    (tmp_path / ".out.v2.0123456789ab.partial").mkdir()
    with pytest.raises(CheckpointError, match="the target exists"):
        run(source, target, dtype=torch.bfloat16)
    assert tensors_of(target)[ROUTER].dtype == torch.float32
    outcome = run(source, target, dtype=torch.bfloat16, overwrite=True)
    assert outcome.kept and not outcome.written and tensors_of(target)[ROUTER].dtype == torch.bfloat16
    # What lies beside it is another target's.
    assert [path.name for path in hidden(target)] == [".out.v2.0123456789ab.partial"]


def test_a_changed_source_does_not_continue_an_earlier_attempt(copy, tmp_path) -> None:
    first = make_plan(HFSource(copy))
    edit_tensors(copy, lambda tensors: tensors[ROUTER].add_(1))
    assert make_plan(HFSource(copy)).fingerprint != first.fingerprint
    source = HFSource(copy)
    plans = [make_plan(source), make_plan(source, dtype=torch.bfloat16), make_plan(source, max_shard_bytes=SMALL)]
    assert len({plan.fingerprint for plan in plans}) == 3 and make_plan(HFSource(copy)) == plans[0]


def test_processes_share_the_files_and_any_number_continues(checkpoint, tmp_path) -> None:
    source, target = checkpoint("plain"), tmp_path / "out"
    outcomes: dict[int, object] = {}

    def work(index: int) -> None:
        outcomes[index] = run(source, target, share=Share(index, 3), patience=30)

    work(2)
    assert not target.exists()
    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    names = sorted(file.name for file in target.glob("*.safetensors"))
    assert [outcomes[i].written for i in range(3)] == [names[i::3] for i in range(3)]
    stored, written = tensors_of(source), tensors_of(target)
    assert all(torch.equal(stored[n], written[n]) for n in stored) and not hidden(target)


def test_the_first_process_does_not_wait_for_ever(checkpoint, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="stopped writing") as caught:
        run(checkpoint("plain"), tmp_path / "out", share=Share(0, 2), patience=0.5)
    assert "model-00002" in str(caught.value) and not (tmp_path / "out").exists()
    assert run(checkpoint("plain"), tmp_path / "out").kept


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, Share(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Share(3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, Share(1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, Share(5, 6)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, Share(0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Share(1, 4)),
    ],
)
def test_each_launcher_says_which_share(variables, share) -> None:
    assert Share.from_environment(variables) == share


def test_half_a_launcher_is_refused() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE"):
        Share.from_environment({"RANK": "1"})


def test_no_room_is_seen_before_anything_is_written(checkpoint, tmp_path, monkeypatch) -> None:
    full = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match="no room") as caught:
        run(checkpoint("plain"), tmp_path / "out")
    assert "0.000 GB free" in str(caught.value) and not list(hidden(tmp_path / "out")[0].iterdir())


def test_a_disk_that_fills_up_is_named_and_what_was_written_is_kept(checkpoint, tmp_path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written") as caught:
            run(checkpoint("plain"), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert "GB of room" in str(caught.value) and not (tmp_path / "out").exists()
    assert run(checkpoint("plain"), tmp_path / "out").written


@pytest.mark.parametrize("keep", [20, -1])
def test_a_torn_source_is_named(copy, tmp_path, keep) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        run(copy, tmp_path / "out")
    assert caught.value.file == file


def test_names_are_compared_before_anything_is_written(copy, tmp_path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.2.mlp.experts.4.up_proj.weight"))
    with pytest.raises(CheckpointError, match="1 missing") as caught:
        run(copy, tmp_path / "out")
    assert caught.value.field == "model.layers.2.mlp.experts.4.up_proj.weight" and not hidden(tmp_path / "out")


def test_check_names_every_bad_tensor(copy) -> None:
    edit_tensors(copy, lambda tensors: tensors[ROUTER].__setitem__((0, 0), torch.nan))
    edit_tensors(copy, lambda tensors: tensors["model.layers.0.mlp.experts.3.down_proj.weight"].fill_(0.5))
    source = HFSource(copy)
    found = {(problem.kind, problem.tensor) for problem in check(source, make_plan(source))}
    assert found == {("non_finite", ROUTER), ("constant", "model.layers.0.mlp.experts.3.down_proj.weight")}


def test_verify_sees_one_flipped_bit_on_either_side(checkpoint, copy, tmp_path) -> None:
    target = tmp_path / "out"
    run(copy, target)
    source = HFSource(copy)
    plan = make_plan(source, max_shard_bytes=SMALL)
    assert verify(source, target, plan).tensors == len(tensors_of(copy))
    entry = read_manifest(target).tensors[ROUTER]
    file = target / entry["file"]
    whole = file.read_bytes()
    start = whole.index(tensors_of(target)[ROUTER].numpy().tobytes())
    file.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    with pytest.raises(CheckpointError, match="written file differs") as caught:
        verify(source, target, plan)
    assert caught.value.field == ROUTER
    file.write_bytes(whole)
    edit_tensors(copy, lambda tensors: tensors[ROUTER].view(torch.int32).bitwise_xor_(1))
    with pytest.raises(CheckpointError, match="the source differs") as caught:
        verify(HFSource(copy), target, plan)
    assert caught.value.field == ROUTER
    (target / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="config.json"):
        verify(source, target, plan)


def test_memory_stays_at_two_parameters(checkpoint, tmp_path, monkeypatch) -> None:
    alive, most, original = [0], [0], shards.prepared

    class Counted:
        def __init__(self, pair) -> None:
            self.pair = pair
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __iter__(self):
            return iter(self.pair)

        def __del__(self) -> None:
            alive[0] -= 1

    monkeypatch.setattr(shards, "prepared", lambda *args: (Counted(pair) for pair in original(*args)))
    run(checkpoint("plain"), tmp_path / "out")
    assert 1 <= most[0] <= 3


def test_ahead_keeps_order_and_hands_errors_over() -> None:
    assert list(ahead(iter(range(100)))) == list(range(100))

    def breaking():
        yield 1
        raise CheckpointError("here")

    items = ahead(breaking())
    assert next(items) == 1
    with pytest.raises(CheckpointError, match="here"):
        next(items)
    before = threading.active_count()
    for _ in ahead(iter(range(100))):
        break
    assert threading.active_count() == before


def test_edit_config_changes_the_identity(copy) -> None:
    before = HFSource(copy).identity()
    edit_config(copy, bos_token_id=3)
    assert HFSource(copy).identity() != before
