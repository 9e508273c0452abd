"""Links between stages, in shared memory and by gloo: order, microbatches in flight, failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from quire.config import ParallelConfig
from quire.distributed.launch import make_group, make_shared
from quire.distributed.pipeline import PipelineGroup, rank_of, stage_of
from quire.errors import RankFailed
from tests.distributed.in_threads import TIMEOUT_S, native_library, run_groups

NUM_MICROBATCHES = 3


def make_stages(
    size: int, folder: Path | None = None, timeout_s: float = TIMEOUT_S, num_microbatches: int = NUM_MICROBATCHES
) -> list[PipelineGroup]:
    """Return the group as each rank of a pipeline has it: in shared memory, or by gloo with a folder."""
    config = ParallelConfig(
        pipeline_parallel_size=size, pipeline_microbatches=num_microbatches, distributed_timeout_s=timeout_s
    )
    if folder is None:
        library = native_library()
        memory = make_shared(library, config)
        try:
            made = {rank: make_group(library, memory, rank, config, "") for rank in range(size)}
        finally:
            os.close(memory)
    else:
        made, store = {}, str(folder / "store")

        def make(rank: int) -> None:
            made[rank] = make_group(None, -1, rank, config, store)

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    return [cast(PipelineGroup, made[rank]) for rank in range(size)]


@pytest.fixture(params=["shared memory", "gloo"])
def stages(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], list[PipelineGroup]]:
    """Return a function that makes the groups of some stages."""
    return lambda size: make_stages(size, tmp_path if request.param == "gloo" else None)


def hidden(turn: int) -> torch.Tensor:
    """Return what goes through the stages in a turn; shapes and dtypes differ, one is larger than a slot for sums."""
    shape = [(1, 1, 3), (2, 5, 64), (1, 700, 2048)][turn % 3]
    dtype = [torch.float32, torch.bfloat16, torch.float32][turn % 3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(turn)).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_hidden_states_go_through_all_stages_in_order(size: int, stages: Callable[[int], list[PipelineGroup]]) -> None:
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


def test_a_sender_does_not_wait_for_receivers_of_microbatches(stages: Callable[[int], list[PipelineGroup]]) -> None:
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


def test_rank_0_has_the_last_stage() -> None:
    for size in (1, 2, 5):
        assert stage_of(0, size) == size - 1
        assert [rank_of(stage_of(rank, size), size) for rank in range(size)] == list(range(size))


def test_a_rank_that_does_not_answer_is_named() -> None:
    groups = make_stages(3, timeout_s=0.2)
    with pytest.raises(RankFailed, match=r"rank 2 did not answer within 0\.2 s"):
        groups[0].receive((1, 1, 4), torch.float32)
    with pytest.raises(RankFailed, match="rank 1 did not answer"):
        groups[2].receive((1, 1, 4), torch.float32)


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
