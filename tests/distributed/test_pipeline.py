"""Links between stages, in shared memory and by gloo: order, microbatches in flight, failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quire.config import ParallelConfig
from quire.distributed.launch import make_group, make_shared
from quire.distributed.pipeline import PipelineGroup, RankGrid
from quire.errors import RankFailed
from tests.distributed.in_threads import TIMEOUT_S, native_library, run_groups

NUM_MICROBATCHES = 3


def make_stages(
    size: int,
    folder: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    num_microbatches: int = NUM_MICROBATCHES,
    **options: Any,
) -> list[PipelineGroup]:
    """Return the group as each rank of a pipeline has it: in shared memory, or by gloo with a folder.

    Args:
        size: number of stages.
        folder: folder of the store.
        timeout_s: see `ParallelConfig`.
        num_microbatches: number of microbatches.
        options: other options of the ranks.
    """
    config = ParallelConfig(
        pipeline_parallel_size=size, pipeline_microbatches=num_microbatches, distributed_timeout_s=timeout_s, **options
    )
    if folder is None:
        library = native_library()
        memory = make_shared(library, config)
        try:
            made = {rank: make_group(library, memory, rank, config, "") for rank in range(config.num_ranks)}
        finally:
            os.close(memory)
    else:
        made, store = {}, str(folder / "store")

        def make(rank: int) -> None:
            made[rank] = make_group(None, -1, rank, config, store)

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(config.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    return [cast(PipelineGroup, made[rank]) for rank in range(config.num_ranks)]


@pytest.fixture(params=["shared memory", "gloo"])
def stages(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[PipelineGroup]]:
    """Return a function that makes the groups of some stages."""
    return lambda size, **options: make_stages(size, tmp_path if request.param == "gloo" else None, **options)


def hidden(turn: int) -> torch.Tensor:
    """Return what goes through the stages in a turn; shapes and dtypes differ, one is larger than a slot for sums."""
    shape = [(1, 1, 3), (2, 5, 64), (1, 700, 2048)][turn % 3]
    dtype = [torch.float32, torch.bfloat16, torch.float32][turn % 3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(turn)).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_hidden_states_go_through_all_stages_in_order(size: int, stages: Callable[..., list[PipelineGroup]]) -> None:
    def body(group: PipelineGroup) -> int:
        for turn in range(12):
            wanted = hidden(turn)
            if group.stage == 0:
                group.send(wanted)
                continue
            found = group.receive(wanted.shape, wanted.dtype)
            assert torch.equal(found, wanted)
            if group.stage < size - 1:
                group.send(found)
        return group.stage

    assert run_groups(stages(size), body) == [size - 1, *range(size - 1)]


def test_a_sender_does_not_wait_for_receivers_of_microbatches(stages: Callable[..., list[PipelineGroup]]) -> None:
    """One thread sends all that may be in flight before it receives anything: no other one could let it go on."""
    last, *others = stages(2)
    (first,) = others
    for start in (0, NUM_MICROBATCHES):
        turns = range(start, start + NUM_MICROBATCHES)
        for turn in turns:
            first.send(hidden(turn))
        for turn in turns:
            wanted = hidden(turn)
            assert torch.equal(last.receive(wanted.shape, wanted.dtype), wanted)


def test_ranks_of_a_stage_sum_among_themselves(stages: Callable[..., list[PipelineGroup]]) -> None:
    """Commands, sums and hidden states in turns, as in steps: each stage adds what its ranks have, on all of them."""
    size, tensor_size, num_turns = 3, 2, 8

    def body(group: PipelineGroup) -> list[float]:
        found = []
        assert group.tensor is not None
        for turn in range(num_turns):
            if group.rank == 0:
                group.send_commands(bytes([turn]) * 9)
            else:
                assert group.receive_commands() == bytes([turn]) * 9
            x = torch.zeros(1, 3, 5) if group.stage == 0 else group.receive((1, 3, 5), torch.float32)
            x = x + group.tensor.all_reduce(torch.full((1, 3, 5), float(10**group.rank)))
            if group.stage < size - 1:
                group.send(x)
            found.append(x[0, 0, 0].item())
        return found

    expected = {0: 111111.0, 1: 111111.0, 2: 1100.0, 3: 1100.0, 4: 111100.0, 5: 111100.0}
    found = run_groups(stages(size, tensor_parallel_size=tensor_size), body)
    assert found == [[expected[rank]] * num_turns for rank in range(size * tensor_size)]


def test_rank_0_has_the_last_stage() -> None:
    for num_stages, tensor_size in ((1, 1), (2, 1), (5, 1), (2, 2), (3, 4)):
        grid = RankGrid(num_stages, tensor_size)
        assert grid.stage_of(0) == num_stages - 1
        places = [(grid.stage_of(rank), grid.tensor_rank_of(rank)) for rank in range(grid.size)]
        assert len(set(places)) == grid.size
        assert [grid.rank_of(*place) for place in places] == list(range(grid.size))
        for stage in range(num_stages):
            assert {grid.stage_of(rank) for rank in grid.ranks_of(stage)} == {stage}
        others = set(range(grid.size)) - set(grid.ranks_of(num_stages - 1))
        assert set(grid.commanded) == {0} | others


def test_a_rank_that_does_not_answer_is_named() -> None:
    groups = make_stages(3, timeout_s=0.2)
    with pytest.raises(RankFailed, match=r"rank 2 did not answer within 0\.2 s"):
        groups[0].receive((1, 1, 4), torch.float32)
    with pytest.raises(RankFailed, match="rank 1 did not answer"):
        groups[2].receive((1, 1, 4), torch.float32)


def test_a_rank_that_takes_no_part_in_a_sum_is_named() -> None:
    groups = make_stages(2, timeout_s=0.2, tensor_parallel_size=2)
    tensor = groups[2].tensor
    assert tensor is not None
    with pytest.raises(RankFailed, match=r"rank 3 did not answer within 0\.2 s"):
        tensor.all_reduce(torch.ones(4))


def test_a_receiver_that_takes_nothing_is_named() -> None:
    groups = make_stages(3, timeout_s=0.2)
    for turn in range(NUM_MICROBATCHES):
        groups[1].send(hidden(turn))
    # More than may be in flight.
    with pytest.raises(RankFailed, match="rank 2 did not answer"):
        groups[1].send(hidden(0))


def test_a_failure_ends_the_waits() -> None:
    groups = make_stages(2)
    failed = threading.Timer(0.1, groups[0].fail, (1,))
    failed.start()
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        groups[0].receive((1, 1, 4), torch.float32)
    failed.join()


def test_a_failure_elsewhere_ends_a_sum() -> None:
    groups = make_stages(2, tensor_parallel_size=2)
    tensor = groups[2].tensor
    assert tensor is not None
    failed = threading.Timer(0.1, groups[2].fail, (1,))
    failed.start()
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        tensor.all_reduce(torch.ones(4))
    failed.join()
