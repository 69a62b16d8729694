"""Do the tests see the faults they are meant for? Plants one at a time in a copy of the package and runs one test.

    python tools/mutate.py                 # all faults, then a table
    python tools/mutate.py temperature     # only faults whose name holds a word
    python tools/mutate.py --list

The checkout is never touched: package and tests are copied to a temporary folder. Without a fault every test used must
pass, else nothing is learned. The exit status is 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("megatron_rl", "tests", "pyproject.toml")
LAYOUT = "tests/dist/test_invariance.py::test_layout[{}]"
STEP = "tests/dist/test_reference_step.py::test_two_steps[{}]"
TESTS_FAILED = 1
"""pytest's exit status for failed tests; others say that no test ran."""


@dataclass(frozen=True)
class Fault:
    """A textual change that breaks one promise."""

    name: str
    file: str
    """Below `megatron_rl`."""
    old: str
    """Occurs once in the file."""
    new: str
    test: str
    """The cheapest test that should fail."""


FAULTS = (
    Fault(
        "loss scale: pairs are rescaled",
        "backend/step.py",
        "return value, torch.zeros((), dtype=torch.int, device=output.device), sums",
        "return value, sums",
        LAYOUT.format("cp2-dp2-ep2"),
    ),
    Fault(
        "context halves: gathered keys taken for ordered ones",
        "backend/attention.py",
        "where_key[gathered] = np.arange(len(gathered))",
        "where_key[np.sort(gathered)] = np.arange(len(gathered))",
        "tests/dist/test_attention.py::test_equals_dense_attention[ragged-2]",
    ),
    Fault(
        "sequence slice: routes of another rank's tokens",
        "backend/micro_batch.py",
        "sequence_slice(len(mine), topology.config.tensor, topology.tp_rank)",
        "sequence_slice(len(mine), topology.config.tensor, topology.config.tensor - 1 - topology.tp_rank)",
        LAYOUT.format("tp2-cp2-ep2-etp2"),
    ),
    Fault(
        "route shift: row of the token before",
        "backend/micro_batch.py",
        "routes.source(row, indices, rows[here])",
        "routes.source(row, indices, np.maximum(rows[here] - 1, 0))",
        "tests/dist/test_replay.py::test_replayed_equals_native[recompute]",
    ),
    Fault(
        "whitening: over this rank's share",
        "training/score.py",
        "whiten(advantages[kept])",
        "(lambda all_ranks, own: (all_ranks - own.mean()) / (own.var(correction=0) + 1e-8).sqrt())"
        "(advantages[kept], advantages[kept][models.topology.dp_rank :: models.topology.dp])",
        LAYOUT.format("dp4"),
    ),
    Fault(
        "stage offset: routes counted from the stage's first layer",
        "training/forward.py",
        "{layer: hf.moe_layers.index(layer) for layer in model.registry.layers}",
        "{layer: index for index, layer in enumerate(model.registry.layers)}",
        "tests/dist/test_replay.py::test_replayed_equals_native[pp2-vpp2]",
    ),
    Fault(
        "recompute rows: the newest micro-batch's",
        "backend/replay.py",
        "return handle.pending.popleft()",
        "return handle.pending.pop()",
        "tests/dist/test_replay.py::test_replayed_equals_native[tp2-pp2-ep2]",
    ),
    Fault(
        "temperature: missing in backward",
        "backend/logprobs.py",
        "grad = (grad / temperature).to(weight.dtype)",
        "grad = grad.to(weight.dtype)",
        "tests/dist/test_logprobs.py::test_equals_plain_softmax[0.7-1-2]",
    ),
    Fault(
        "padded vocabulary: padding rows get probability",
        "backend/logprobs.py",
        "if padding > 0:",
        "if padding > len(weight):",
        "tests/dist/test_logprobs.py::test_equals_plain_softmax[0.7-1-2]",
    ),
    Fault(
        "mask shift: read at the sampled token",
        "batching/streams.py",
        "reads[sampled - 1] = np.arange(len(sampled))",
        "reads[sampled] = np.arange(len(sampled))",
        "tests/unit/batching/test_streams.py",
    ),
    Fault(
        "aux scale: once more for every data rank",
        "training/update.py",
        "aux_weight=1.0 / max(routed, 1)",
        "aux_weight=models.topology.dp / max(routed, 1)",
        LAYOUT.format("tp2-dp2-ep4"),
    ),
    Fault(
        "aux gradient: doubled where it is attached",
        "backend/replay.py",
        "return grad, torch.ones_like(ctx.saved_tensors[0])",
        "return grad, 2 * torch.ones_like(ctx.saved_tensors[0])",
        "tests/dist/test_routers.py::test_router_losses_equal_their_formulas[softmax]",
    ),
    Fault(
        "EWMA tick: before the step's weight counts",
        "objectives/ewma.py",
        "    z = decay * z + 1\n",
        "    z = decay * (z + 1)\n",
        STEP.format("decoupled"),
    ),
    Fault(
        "EWMA swap: float32 weights are not put back",
        "backend/anchor.py",
        "kept = [main if saved is None else saved for",
        "kept = [main for",
        "tests/dist/test_anchor.py::test_swap_shows_other_weights_and_restores_every_bit[dp2 float32]",
    ),
    Fault(
        "value gather: gradients summed over tensor ranks",
        "backend/step.py",
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        LAYOUT.format("tp2-cp2-ep2-etp2"),
    ),
    Fault(
        "gradient norm: shards taken for copies",
        "backend/optimizer.py",
        "replicas(self.model, local) // (optimizer_shards(self.model, local) if sharded else 1)",
        "replicas(self.model, local)",
        LAYOUT.format("dp4"),
    ),
    Fault(
        "norms: gradient not summed over sequence shards",
        "backend/layers.py",
        "(config)\n        )\n        self.weight.sequence_parallel = config.sequence_parallel",
        "(config)\n        )\n        self.weight.sequence_parallel = False",
        LAYOUT.format("tp2-dp2-ep4"),
    ),
    Fault(
        "experts: gradient reduced over the dense group",
        "backend/model.py",
        "parameter.allreduce = False",
        "parameter.allreduce = True",
        LAYOUT.format("tp2"),
    ),
    Fault(
        "weight decay: norms decay too",
        "backend/optimizer.py",
        'self.config.weight_decay * group["wd_mult"]',
        "self.config.weight_decay",
        STEP.format("decoupled"),
    ),
    Fault(
        "pad ids: one expert k times",
        "backend/micro_batch.py",
        "filler.astype(np.int64)",
        "np.zeros_like(filler, dtype=np.int64)",
        "tests/dist/test_replay.py::test_every_token_goes_to_k_experts",
    ),
    Fault(
        "truncation: bootstrap read before the boundary",
        "batching/streams.py",
        "reads[spliced[cut + 1] - 1] = decisions + cut",
        "reads[spliced[cut + 1] - 2] = decisions + cut",
        STEP.format("decoupled"),
    ),
    Fault(
        "ledger: a trajectory may come twice",
        "run_dir/ledger.py",
        "self._seen.update(entry.rows())",
        "self._seen.update(())",
        "tests/unit/run_dir/test_ledger.py",
    ),
    Fault(
        "ledger: plans of a lost run are forgotten",
        "run_dir/ledger.py",
        "self._planned = {entry.iteration: entry for entry in later}",
        "self._planned = {}",
        "tests/unit/run_dir/test_ledger.py",
    ),
    Fault(
        "ledger: a torn line stays",
        "run_dir/ledger.py",
        "self._stale = _torn(self.path)",
        "self._stale = False",
        "tests/unit/run_dir/test_ledger.py",
    ),
    Fault(
        "ledger: only the last line is checked",
        "run_dir/ledger.py",
        "(self._checksum + self._lines[-1])",
        "(self._lines[-1])",
        "tests/unit/run_dir/test_ledger.py",
    ),
    Fault(
        "lock: a process number that is used again counts as alive",
        "processes.py",
        "    return start_time(number) != started\n",
        "    return start_time(number) == ''\n",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "lock: a requeued job waits for itself",
        "run_dir/lock.py",
        "holder.restart < us.restart",
        "holder.restart > us.restart",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "lock: a process of another namespace of numbers counts as dead",
        "processes.py",
        "if not where or where != place() or not started:",
        "if not started:",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "lock: clocks of two hosts are compared",
        "run_dir/lock.py",
        "if silence < STALE_SECONDS:",
        "if time.time() - seen.changed / 1e9 < STALE_SECONDS:",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "lock: an owner that cannot touch it goes on",
        "run_dir/lock.py",
        "if untouched.look(self._touched) > GIVE_UP_SECONDS:",
        "if untouched.look(self._touched) < 0:",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "publish: a directory renamed away is lost with its writer",
        "files.py",
        'match["kind"] == "replaced"',
        'match["kind"] == "restored"',
        "tests/unit/test_files.py",
    ),
    Fault(
        "lock: a lost owner goes on writing",
        "run_dir/lock.py",
        "os._exit(1)",
        "return",
        "tests/unit/run_dir/test_lock.py",
    ),
    Fault(
        "stop: each rank decides for itself",
        "training/stopping.py",
        "return bool(flag.item())",
        "return self.here",
        "tests/dist/test_stopping.py::test_a_stopped_run_goes_on_at_the_next_step",
    ),
    Fault(
        "resume: optimizer moments are lost",
        "training/checkpoint.py",
        '    models.version = run["version"]\n',
        '    models.version = run["version"]\n'
        "    for model in filter(None, (models.actor, models.critic)):\n"
        "        for part in model.parts:\n"
        "            for state in part.optimizer.state.values():\n"
        '                _ = [state[name].zero_() for name in ("exp_avg", "exp_avg_sq")]\n',
        "tests/dist/test_training.py::test_a_resumed_run_is_the_unbroken_run",
    ),
    Fault(
        "sampling: depends on what was played before",
        "engines/local.py",
        "if streams is None else streams",
        "if True else streams",
        "tests/unit/engines/test_local.py::test_a_stream_samples_the_same_whatever_shares_its_batch",
    ),
    Fault(
        "sampling: every position draws the same",
        "engines/local.py",
        "self._seed, name, len(row) + step",
        "self._seed, name, len(row)",
        "tests/unit/engines/test_local.py::test_a_stream_samples_the_same_whatever_shares_its_batch",
    ),
    Fault(
        "streams: replicas that were started alike sample alike",
        "engines/vllm/replica_state.py",
        "        await self.reseed()\n",
        "",
        "tests/unit/engines/test_vllm_sleep.py::test_no_two_streams_are_alike",
    ),
    Fault(
        "parent watch: what a server started outlives it",
        "engines/vllm/parent_watch.py",
        "    if orphaned.is_set():\n",
        "    if False:\n",
        "tests/unit/engines/test_vllm_server.py::test_a_restarting_server_leaves_no_process_behind",
    ),
)


def plant(fault: Fault, folder: Path) -> str:
    """Write the fault into the copy in `folder`; returns the file's text without it.

    Raises:
        ValueError: the text to change does not occur exactly once.
    """
    path = folder / "megatron_rl" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} holds {fault.old!r} {text.count(fault.old)} times, expected once")
    path.write_text(text.replace(fault.old, fault.new))
    return text


def run_tests(tests: Sequence[str], folder: Path) -> tuple[int, str, float]:
    """(pytest's exit status, its last explanation of a failure, seconds) of these tests on the copy in `folder`."""
    # No bytecode: a file changed twice within a second would keep the stale one.
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    reasons = [
        line[1:].strip() for line in done.stdout.splitlines() if re.match(r"E +(\S*(Error|Failure)\b|assert )", line)
    ]
    return done.returncode, reasons[-1] if reasons else "", time.monotonic() - begin


def outcome(status: int) -> str:
    """What an exit status says about a planted fault."""
    return {0: "SURVIVED", TESTS_FAILED: "caught"}.get(status, f"no verdict (pytest status {status})")


def try_fault(fault: Fault, folder: Path) -> str:
    """Plant, test, take out again; prints a line and returns the outcome."""
    text = plant(fault, folder)
    try:
        status, reason, seconds = run_tests([fault.test], folder)
    finally:
        (folder / "megatron_rl" / fault.file).write_text(text)
    print(f"{outcome(status):10}{seconds:5.0f} s  {fault.name:58}{fault.test}\n{'':19}{reason[:120]}", flush=True)
    return outcome(status)


def copy_checkout(folder: Path) -> None:
    """Package, tests and their settings, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults asked for. See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="names only")
    options = parser.parse_args(arguments)
    chosen = [f for f in FAULTS if not options.words or any(word in f.name for word in options.words)]
    if options.list:
        print("\n".join(fault.name for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        copy_checkout(folder)
        status, reason, seconds = run_tests(sorted({fault.test for fault in chosen}), folder)
        print(f"without a fault: pytest status {status}, {seconds:.0f} s {reason}", flush=True)
        if status:
            return 1
        caught = sum(try_fault(fault, folder) == "caught" for fault in chosen)
    print(f"caught {caught} of {len(chosen)}")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
