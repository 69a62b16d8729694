"""The plan agrees with Megatron: which ranks form a group, how many parameters a rank holds, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import RunConfig, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.hf.config import read_hf_config
from megatron_rl.launch.plan import Cluster, describe, find_shape, groups_inside, plan_launch, role_memory

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BIG = EXAMPLES / "qwen3_235b_a22b"
BUILD = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron_rl.backend import platform, topology
platform.install()
from megatron_rl.backend.model import build_chunks, transformer_config
from megatron_rl.config import ParallelConfig, PerformanceConfig
from megatron_rl.hf.config import read_hf_config
rank, world, layout, shape = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), read_hf_config(sys.argv[4])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
parallel = ParallelConfig(**layout)
place = topology.initialize(parallel, seed=0, fake=True)
counts = []
for role, hf in (("policy", shape), ("value", shape.as_critic())):
    config = transformer_config(hf, parallel, PerformanceConfig(), torch.bfloat16, meta=True)
    counts.append(sum(p.numel() for c in build_chunks(hf, config, place, role) for p in c.parameters()))
print(json.dumps(counts))
"""


def run(**sections) -> RunConfig:
    return RunConfig.model_validate(sections)


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 3, 4, 8])
)
def test_groups_are_megatrons(tensor: int, context: int, expert: int, gpus: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    nodes, world = 8, 8 * gpus
    config = run(parallel={"tensor": tensor, "context": context, "expert": expert}).parallel
    if world % (tensor * context) or world % expert:
        return
    ranks = RankGenerator(
        tp=tensor, ep=1, dp=world // (tensor * context), pp=1, cp=context, order="tp-cp-ep-dp-pp", rank_offset=0
    )
    experts = RankGenerator(tp=1, ep=expert, dp=world // expert, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=0)
    groups = {"tensor": ranks.get_ranks("tp"), "context": ranks.get_ranks("cp"), "expert": experts.get_ranks("ep")}
    found = groups_inside(config, Cluster(nodes, gpus))
    for name, members in groups.items():
        assert found[name] == all(len({rank // gpus for rank in group}) == 1 for group in members), name


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (256, {"tensor": 4, "pipeline": 8, "expert": 8, "first_stage_layers": 11, "last_stage_layers": 11}),
        pytest.param(32, {"tensor": 2, "expert": 8, "expert_tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_parameters_of_the_fullest_rank_are_those_megatron_builds(world: int, layout: dict) -> None:
    config = run(parallel=layout)
    shape = read_hf_config(BIG)
    stage = world // config.parallel.pipeline
    built = []
    # The first stage has an embedding, the last a head as large and a norm: it is never the fullest.
    for first in {stage % world, world - stage}:
        command = [sys.executable, "-c", BUILD, str(first), str(world), json.dumps(layout), str(BIG)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        built.append(json.loads(done.stdout.splitlines()[-1]))
    for role, found in zip((shape, shape.as_critic()), zip(*built, strict=True), strict=True):
        assert role_memory(config, world, role).local_parameters == max(found)


def test_bytes_of_a_rank_are_counted_by_hand() -> None:
    shape = replace(read_hf_config(BIG), num_layers=2, moe_layers=(0, 1), num_experts=4)
    config = run(parallel={"expert": 2}, algorithm={"anchor": "ewma"})
    found = role_memory(config, 4, shape)
    experts = 2 * 4 * 3 * shape.hidden_size * shape.moe_ffn_size
    dense = found.parameters - experts
    assert found.local_parameters == dense + experts // 2
    # bfloat16 weights; float32 gradients, main weights, two moments and the average.
    assert (found.weights, found.gradients) == (2 * found.local_parameters, 4 * found.local_parameters)
    assert found.optimizer == 16 * (dense // 4 + experts // 2 // 2)
    critic = role_memory(config, 4, shape.as_critic())
    assert critic.optimizer < found.optimizer * 12 / 16 + 1


def test_phase_offload_holds_one_model_at_a_time() -> None:
    shape = read_hf_config(BIG)
    layout = {"tensor": 4, "expert": 8}
    both, one = (
        plan_launch(run(parallel=layout | {"phase_offload": offload}), Cluster(8, 8), shape)
        for offload in (False, True)
    )
    assert both.bytes_per_gpu - one.bytes_per_gpu == both.critic.working
    assert "one model's gradients" in "\n".join(describe(one))


def test_a_run_without_a_critic_is_planned_without_one() -> None:
    plan = plan_launch(
        run(parallel={"tensor": 4, "expert": 8}, algorithm={"estimator": "grpo"}), Cluster(8, 8), read_hf_config(BIG)
    )
    assert plan.critic is None and plan.bytes_per_gpu == plan.actor.weights + plan.actor.working
    assert not any(line.startswith("critic") or "models'" in line for line in describe(plan))


@pytest.mark.parametrize(
    ("layout", "nodes", "setting"),
    [
        ({"tensor": 4, "pipeline": 8}, 3, "parallel.tensor, parallel.pipeline"),
        ({"expert": 16}, 1, "parallel.expert"),
        ({"tensor": 8}, 1, "parallel.tensor"),
        ({"pipeline": 8}, 1, "parallel.pipeline"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: dict, nodes: int, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_launch(run(parallel=layout), Cluster(nodes, 8), read_hf_config(BIG))
    assert setting in caught.value.setting


def test_expert_groups_across_nodes_are_told_and_a_segment_answers() -> None:
    config = run(parallel={"tensor": 4, "expert": 16})
    (warning,) = plan_launch(config, Cluster(4, 8), None).warnings
    assert "expert groups of 16 ranks lie across" in warning and "Change: parallel.expert" in warning
    assert plan_launch(config, Cluster(4, 8, segment=2), None).warnings == ()


def test_idle_replicas_are_told() -> None:
    (warning,) = plan_launch(run(rollout={"episodes": 8}), Cluster(2, 8), None).warnings
    assert "8 episodes for 16 data replicas" in warning


def test_a_plan_without_a_shape_says_so() -> None:
    plan = plan_launch(run(), Cluster(1, 8), None)
    assert plan.bytes_per_gpu is None and "not estimated" in "\n".join(describe(plan))


@pytest.mark.parametrize(("recipe", "nodes"), [("qwen3_30b_a3b/ppo.yaml", 4), ("qwen3_235b_a22b/ppo.yaml", 32)])
def test_recipes_fit_eight_gpus_of_80_gib(recipe: str, nodes: int) -> None:
    config = load_config(EXAMPLES / recipe)
    plan = plan_launch(config, Cluster(nodes, 8), find_shape(config, EXAMPLES / recipe))
    assert plan.warnings == () and all(plan.inside.values())
    assert plan.bytes_per_gpu < 60 * 2**30, "leaves room for activations"
