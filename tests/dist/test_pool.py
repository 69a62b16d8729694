"""The rank pool: results come back by rank, failures are told and do no lasting harm, nothing leaks."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankFailure, RankPool


def sum_of_ranks(offset: int) -> torch.Tensor:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return value


def raise_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ArithmeticError(f"planted on rank {failing}")
    dist.barrier()


def hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        time.sleep(600)


def die_on(dying: int) -> None:
    if dist.get_rank() == dying:
        os._exit(7)
    dist.barrier()


def descriptors_of_an_early_rank() -> list[int]:
    """Rank 0 is done at once; rank 1 counts rank 0's open descriptors, right away and half a second later."""
    process_ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())
    counts = []
    for pause in (0.0, 0.5) if dist.get_rank() == 1 else ():
        time.sleep(pause)
        counts.append(len(os.listdir(f"/proc/{process_ids[0]}/fd")))
    return counts


def unpicklable_result() -> object:
    return threading.Lock()


def process_id() -> int:
    return os.getpid()


def random_number() -> float:
    return torch.rand(()).item()


def change_defaults() -> None:
    torch.rand(5)
    torch.set_default_dtype(torch.float64)


def open_resources() -> tuple[int, int]:
    """File descriptors and threads of this rank process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def initialize_megatron(tensor: int, expert: int) -> tuple[int, int]:
    from megatron.core import parallel_state, tensor_parallel

    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert, create_gloo_process_groups=True
    )
    tensor_parallel.random.initialize_rng_tracker()
    dist.all_reduce(torch.ones(1), group=parallel_state.get_expert_model_parallel_group())
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_expert_model_parallel_world_size()


def megatron_leftovers() -> list[str]:
    """Names of Megatron globals that differ from a fresh import."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.router_replay import RouterReplay

    left = [name for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper() and value]
    left += [name for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED") if vars(random)[name]]
    return left + ["router replay"] * len(RouterReplay.global_router_replay_instances)


def leave_a_router() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay()


def test_results_come_back_in_rank_order(ranks: RankPool) -> None:
    results = ranks.run(sum_of_ranks, 4, 10)
    assert [value.tolist() for value in results] == [[0 + 1 + 2 + 3 + 4 * 10]] * 4
    assert len(set(ranks.run(process_id, 4))) == 4


def test_processes_are_reused(ranks: RankPool) -> None:
    first, second = ranks.run(process_id, 2), ranks.run(process_id, 1)
    assert second[0] == first[0]


def test_cases_start_from_the_same_defaults(ranks: RankPool) -> None:
    before = ranks.run(random_number, 1)
    ranks.run(change_defaults, 1)
    assert ranks.run(random_number, 1) == before


def test_exception_is_told_with_its_rank_and_does_not_hang_the_others(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(raise_on, 3, 1)
    assert time.monotonic() - start < 30
    sections = str(caught.value).split("--- rank ")
    assert "planted on rank 1" in sections[2] and "in raise_on" in sections[2]
    assert "planted" not in sections[1] + sections[3]
    assert ranks.run(sum_of_ranks, 3, 0)[2].item() == 3


def test_hang_is_killed_at_its_timeout_and_told_where(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(hang_on, 2, 1, timeout=2.0)
    assert time.monotonic() - start < 20
    sections = str(caught.value).split("--- rank ")
    assert "no answer" in sections[2] and "in hang_on" in sections[2]
    assert ranks.run(sum_of_ranks, 2, 0)[1].item() == 1


def test_dead_process_is_told_with_its_exit_code(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1: process died, exit code 7"):
        ranks.run(die_on, 2, 1)
    assert ranks.run(sum_of_ranks, 2, 0)[0].item() == 1


def test_result_that_cannot_be_pickled_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="cannot pickle"):
        ranks.run(unpicklable_result, 1)


@pytest.mark.parametrize("world_size", [0, 9])
def test_world_size_is_checked(ranks: RankPool, world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        ranks.run(process_id, world_size)


def test_rank_that_is_done_keeps_its_connections_until_all_are(ranks: RankPool) -> None:
    _, (before, after) = ranks.run(descriptors_of_an_early_rank, 2)
    assert after == before


def test_changing_world_sizes_leaks_neither_descriptors_nor_threads(ranks: RankPool) -> None:
    ranks.run(sum_of_ranks, 4, 0)
    before, ours = ranks.run(open_resources, 4), len(os.listdir("/proc/self/fd"))
    for world_size in (1, 2, 3, 4, 2, 4, 1, 3, 4, 2):
        ranks.run(sum_of_ranks, world_size, 0)
    assert ranks.run(open_resources, 4) == before
    assert len(os.listdir("/proc/self/fd")) == ours


def test_no_state_of_megatron_outlives_a_case(ranks: RankPool) -> None:
    assert ranks.run(initialize_megatron, 4, 1, 4) == [(1, 4)] * 4
    before = ranks.run(open_resources, 4)
    for tensor, expert in ((2, 2), (1, 2), (4, 1)):
        assert ranks.run(initialize_megatron, 4, tensor, expert) == [(tensor, expert)] * 4
        ranks.run(leave_a_router, 4)
        assert ranks.run(megatron_leftovers, 4) == [[]] * 4
    assert ranks.run(open_resources, 4) == before


def test_close_ends_the_processes() -> None:
    with RankPool() as pool:
        (pid,) = pool.run(process_id, 1)
        assert os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(f"/proc/{pid}")
