"""What would be submitted: the exact sbatch call, frozen settings, chains, site settings, documented commands."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli.app import app
from megatron_rl.config import RunConfig, load_config
from megatron_rl.errors import ConfigError, LaunchError
from megatron_rl.launch.submit import (
    JobOptions,
    depending_on,
    read_site,
    scripts_folder,
    send,
    submissions,
    submit_run,
)

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples" / "qwen3_30b_a3b" / "ppo.yaml"


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MRL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that notes its arguments and answers with numbers; returns the notes."""
    program, notes = tmp_path / "bin" / "sbatch", tmp_path / "notes"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$MRL_REQUEUE:$@" >>{notes}\necho "$(wc -l <{notes});local"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return notes


def config(output: Path) -> RunConfig:
    return load_config(RECIPE, [f"output={output}"])


def command(options: JobOptions, output: Path = Path("run")) -> list[str]:
    return list(submissions(config(output), options, Path("c.yaml"), ROOT / "slurm")[0].command)


def test_sizes_and_paths_are_in_the_call(tmp_path: Path) -> None:
    words = command(JobOptions(4, 8, partition="gpu", account="lab", time="1:00:00"), tmp_path / "run")
    assert words[:2] == ["sbatch", "--parsable"] and words[-2:] == [str(ROOT / "slurm" / "train.sbatch"), "c.yaml"]
    assert {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=gpu", "--account=lab"} < set(words)
    assert f"--output={tmp_path}/run/slurm/job-%j.log" in words and "--job-name=run" in words


def test_without_gpus_nothing_asks_for_them() -> None:
    words = command(JobOptions(2, 0, ranks_per_node=3))
    assert "--ntasks-per-node=3" in words and not [word for word in words if "gpu" in word]


def test_rollout_nodes_are_a_second_component() -> None:
    words = command(JobOptions(4, 8, rollout_nodes=2, partition="gpu", account="lab"))
    colon = words.index(":")
    first, second = words[:colon], words[colon + 1 :]
    assert "--nodes=4" in first and {"--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--account=lab"} < set(
        second
    )
    assert second[-2].endswith("train_rollout.sbatch")


def test_several_rollout_nodes_get_servers_of_the_policy() -> None:
    one, several = (
        submissions(config(Path("run")), JobOptions(4, 8, rollout_nodes=nodes), Path("c"), ROOT / "slurm")[0].variables
        for nodes in (1, 2)
    )
    assert "MRL_SERVER_MODEL" not in one and several["MRL_SERVER_MODEL"] == "/models/Qwen3-30B-A3B"
    assert several["MRL_SERVER_ARGS"] == "-- --tensor-parallel-size 2 --data-parallel-size 4"


def test_servers_get_every_engine_option_or_the_submission_is_refused() -> None:
    def asked(**more: object) -> str:
        run = config(Path("run"))
        engine = run.rollout.engine_options | {"max_num_seqs": 16, "extra": {"block_size": 32}} | more
        rollout = run.rollout.model_copy(update={"engine_options": engine, "engine_dtype": "float32"})
        changed = run.model_copy(update={"rollout": rollout})
        return submissions(changed, JobOptions(4, 8, rollout_nodes=2), Path("c"), ROOT / "slurm")[0].variables[
            "MRL_SERVER_ARGS"
        ]

    assert {"--dtype float32", "--max-num-seqs 16", "--block-size 32"} <= {
        " ".join(pair) for pair in itertools.pairwise(asked().split())
    }
    for wrong, found in (({"no_such": 1}, "no_such"), ({"extra": {"override": {"a": 1, "b": 2}}}, "spaces")):
        with pytest.raises(ConfigError, match=found):
            asked(**wrong)


@pytest.mark.parametrize(
    ("overrides", "nodes", "setting"),
    [
        (["rollout.mode=sync", "rollout.engine=embedded"], 1, "rollout.mode=one_step_off"),
        (["rollout.engine=embedded"], 2, "--rollout-nodes 1"),
    ],
)
def test_rollout_nodes_without_a_use_are_refused(overrides: list[str], nodes: int, setting: str) -> None:
    with pytest.raises(LaunchError, match=setting):
        submit_run(load_config(RECIPE, overrides), JobOptions(4, 8, rollout_nodes=nodes), RECIPE, dry_run=True)


def test_site_settings_lose_to_options_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "site.env").write_text("# MRL_ACCOUNT=none\nMRL_PARTITION=a\nMRL_TIME=2:00:00\nMRL_SBATCH_ARGS=--qos=x\n")
    assert read_site(folder / "site.env") == {
        "MRL_PARTITION": "a", "MRL_TIME": "2:00:00", "MRL_SBATCH_ARGS": "--qos=x",
    }  # fmt: skip
    monkeypatch.setenv("MRL_TIME", "3:00:00")
    words = submissions(config(tmp_path), JobOptions(1, 8, partition="b"), Path("c"), folder)[0].command
    assert {"--partition=b", "--time=3:00:00", "--qos=x"} < set(words) and "--account=none" not in words


def test_the_shell_reads_site_settings_as_python_does(tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text("# MRL_ACCOUNT=none\nMRL_PARTITION=a b\nMRL_TIME=2\nMRL_LAST=1")
    script = f"source {ROOT}/slurm/lib.sh; load_site {site}; env | grep ^MRL_ | sort"
    environment = {"PATH": os.environ["PATH"], "MRL_TIME": "3"}
    shown = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[:-1] == ["MRL_LAST=1", "MRL_PARTITION=a b", "MRL_TIME=3"]
    assert read_site(site) == {"MRL_LAST": "1", "MRL_PARTITION": "a b", "MRL_TIME": "2"}


def test_a_chain_links_each_job_to_the_one_before(tmp_path: Path, sbatch: Path) -> None:
    jobs = send(submissions(config(tmp_path), JobOptions(4, 8, chain=3), Path("c.yaml"), ROOT / "slurm"))
    assert jobs == ["1", "2", "3"]
    first, second, third = sbatch.read_text().splitlines()
    assert "--dependency" not in first and all(line.startswith("0:") for line in (first, second, third))
    assert "--dependency=afternotok:1 --kill-on-invalid-dep=yes" in second
    assert "--dependency=afternotok:2 --kill-on-invalid-dep=yes" in third


def test_a_job_reads_settings_frozen_at_submission(tmp_path: Path, sbatch: Path) -> None:
    run = load_config(RECIPE, [f"output={tmp_path}/run", "optimizer.lr=0.125"])
    assert submit_run(run, JobOptions(4, 8), RECIPE, dry_run=False) == ["1"]
    file = Path(sbatch.read_text().split()[-1])
    assert load_config(file) == run and file.parent == tmp_path / "run" / "slurm"
    other = load_config(RECIPE, [f"output={tmp_path}/run", "optimizer.lr=0.25"])
    submit_run(other, JobOptions(4, 8), RECIPE, dry_run=False)
    assert load_config(file) == run, "an earlier submission's file stays as it was"


def test_a_dry_run_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_run(config(tmp_path / "run"), JobOptions(4, 8, chain=2), RECIPE, dry_run=True) == []
    shown = capsys.readouterr().out
    assert "--dependency=afternotok:JOB1" in shown and "lr: 1.0e-06" in shown and "30.53 B parameters" in shown
    assert not (tmp_path / "run").exists()


def test_the_printed_call_is_the_call(tmp_path: Path) -> None:
    submission = depending_on(
        submissions(config(tmp_path), JobOptions(4, 8, name="a b"), Path("c"), ROOT / "slurm")[0], "7"
    )
    words = shlex.split(str(submission))
    count = len(submission.variables)
    assert words[count:] == list(submission.command)
    assert words[:count] == [f"{name}={value}" for name, value in submission.variables.items()]


def test_what_sbatch_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    chain = submissions(config(tmp_path), JobOptions(4, 8), Path("c"), ROOT / "slurm")
    with pytest.raises(LaunchError, match="invalid partition"):
        send(chain)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="sbatch was not found"):
        send(chain)


def test_a_missing_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="MRL_ROOT"):
        scripts_folder({"MRL_ROOT": str(tmp_path)})


def documented() -> list[str]:
    """The `submit` calls of the guide."""
    text = (ROOT / "docs" / "slurm.md").read_text().replace("\\\n", " ")
    return re.findall(r"^python -m megatron_rl\.cli (submit .*?)(?:\s+#.*)?$", text, re.M)


@pytest.mark.parametrize("arguments", documented())
def test_documented_submissions_would_be_accepted(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(arguments)
    done = CliRunner().invoke(app, words if "--dry-run" in words else [*words, "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "sbatch --parsable" in done.output and "nothing was submitted" in done.output
    assert "warning" not in done.output
