"""Messages over files, and what counts as a sign of life."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.errors import ConfigError, LaunchError
from megatron_rl.run_dir.exchange import Exchange, Heartbeat, Progress
from megatron_rl.training.rollout_sources.heartbeat_monitor import HeartbeatMonitor

QUICK = RolloutConfig(start_timeout=0.2, heartbeat_timeout=0.2)


def beat(exchange: Exchange, number: int, state: str = "playing", problem: str = "") -> None:
    exchange.write_heartbeat(Heartbeat(number, state, 3, 7, problem))


def watch_for(signs: HeartbeatMonitor, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        signs.check("something is missing")
        time.sleep(0.01)


def test_messages_come_back_and_absent_ones_are_none(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    assert exchange.progress() is None and exchange.heartbeat() == (None, 0.0) and exchange.evaluations() == {}
    exchange.write_progress(Progress(4, 32))
    exchange.write_evaluation(4, 0.25)
    beat(exchange, 1)
    assert exchange.progress() == Progress(4, 32, done=False)
    assert exchange.heartbeat()[0] == Heartbeat(1, "playing", 3, 7)
    assert exchange.evaluations() == {4: 0.25}


def test_published_versions_are_directories_under_their_final_name(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    for name in ("version-000002", "version-000010", ".version-000011.staged", "version-x"):
        (exchange.weights / name).mkdir(parents=True)
    exchange.reject(10, "canary")
    assert sorted(exchange.published()) == [2, 10]
    assert exchange.rejection(10) == "canary" and exchange.rejection(2) is None
    exchange.forget_rejection(10)
    assert exchange.rejection(10) is None


def test_a_torn_message_is_none(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.write_progress(Progress(1, 1))
    (tmp_path / "exchange" / "progress.json").write_text('{"version": 1, ')
    assert exchange.progress() is None


def test_a_beating_heart_is_alive_for_ever(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    signs = HeartbeatMonitor(exchange, QUICK)
    for number in range(40):
        beat(exchange, number)
        signs.check("x")
        time.sleep(0.01)


def test_nobody_who_ever_was_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nothing heard yet"):
        watch_for(HeartbeatMonitor(Exchange(tmp_path), QUICK), 1.0)


def test_a_heart_that_stops_is_told_with_its_last_word(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    signs = HeartbeatMonitor(exchange, QUICK)
    beat(exchange, 1, problem="the disk is full")
    with pytest.raises(LaunchError, match=r"7 recorded, the disk is full"):
        watch_for(signs, 1.0)


def test_a_process_that_starts_has_more_time(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    signs = HeartbeatMonitor(exchange, RolloutConfig(start_timeout=0.6, heartbeat_timeout=0.1))
    beat(exchange, 1, state="starting")
    watch_for(signs, 0.4)
    with pytest.raises(LaunchError, match="starting"):
        watch_for(signs, 1.0)


def test_the_last_word_of_an_earlier_process_is_not_a_sign(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    beat(exchange, 1, state="failed", problem="old")
    signs = HeartbeatMonitor(exchange, QUICK)
    signs.check("x")
    beat(exchange, 2, state="failed", problem="new")
    with pytest.raises(LaunchError, match="it failed: new"):
        signs.check("x")


def test_only_finished_is_finished(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    signs = HeartbeatMonitor(exchange, QUICK)
    beat(exchange, 1)
    assert not signs.finished
    beat(exchange, 2, state="finished")
    assert signs.finished


def test_asynchronous_rollouts_need_an_explicit_anchor() -> None:
    with pytest.raises(ConfigError, match="explicit anchor"):
        load_config(None, ["rollout.mode=async"])
    with pytest.raises(ConfigError, match="explicit anchor"):
        load_config(None, ["rollout.mode=one_step_off"])
    chosen = load_config(None, ["rollout.mode=async", "algorithm.anchor=ewma", "rollout.max_staleness=4"])
    assert chosen.rollout.staleness == 4 and chosen.rollout.has_process
    again = load_config(None, [f"rollout={json.dumps({'mode': 'sync'})}"])
    assert again.rollout.staleness == 0 and not again.rollout.has_process


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["rollout.colocated=true"], "phase_offload"),
        (["rollout.colocated=true", "rollout.mode=one_step_off", "algorithm.anchor=ewma"], "take turns"),
        (["rollout.servers=[http://a:1]"], "vllm_http"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(None, overrides)
