"""Pages of a cache are prefaulted ahead of use, and only while the engine rests."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.platform.prefault import LEAST_AHEAD, PIECE_BYTES, CacheUse, Prefaulter
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux")

MIB = 1 << 20
BLOCK_BYTES = MIB
NUM_BLOCKS = 320


def resident(memory: torch.Tensor) -> int:
    """Return how many bytes of a tensor have pages."""
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(memory.data_ptr() + memory.nbytes - first) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def views() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the views of two groups, the second's blocks half as large."""
    area = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)  # never used before, as a tensor's memory may have been
    memory = torch.frombuffer(area, dtype=torch.uint8)
    return memory.view(NUM_BLOCKS, -1), memory.view(2 * NUM_BLOCKS, -1)


def test_as_much_is_ready_as_is_in_use_and_a_little_at_first(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    memory = views[0]
    use = CacheUse(2)
    prefaulter = Prefaulter(views, use)
    wait_for(lambda: prefaulter.ready_bytes >= LEAST_AHEAD)
    assert LEAST_AHEAD - PIECE_BYTES <= resident(memory) <= LEAST_AHEAD + PIECE_BYTES
    memory[:10] = 7
    use.highest_blocks[:] = 9, 199
    wait_for(lambda: prefaulter.ready_bytes >= 200 * MIB)  # 100 in use
    assert 200 * MIB - 100 * MIB <= resident(memory) <= 200 * MIB + PIECE_BYTES
    assert (memory[:10] == 7).all()
    use.highest_blocks[0] = NUM_BLOCKS - 1
    wait_for(lambda: prefaulter.ready_bytes == NUM_BLOCKS * MIB)


def test_nothing_is_asked_for_while_a_step_goes_on(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    use = CacheUse(2)
    prefaulter = Prefaulter(views, use)
    wait_for(lambda: prefaulter.ready_bytes >= LEAST_AHEAD)
    use.is_stepping, use.num_steps = True, 1
    use.highest_blocks[0] = 99
    before = prefaulter.ready_bytes
    time.sleep(0.8)
    assert prefaulter.ready_bytes == before
    use.is_stepping = False
    wait_for(lambda: prefaulter.ready_bytes >= 200 * MIB)


def test_it_ends_with_the_cache(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    prefaulter = Prefaulter(views, CacheUse(2))
    asking = prefaulter._range
    del prefaulter
    before = asking.ready
    time.sleep(0.5)
    assert asking.ready == before < LEAST_AHEAD


def test_small_caches_and_other_devices_have_none(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert Prefaulter.of([views[0][:10]], CacheUse(1)) is None
    assert Prefaulter.of([torch.empty(NUM_BLOCKS, MIB, dtype=torch.uint8, device="meta")], CacheUse(1)) is None
    assert Prefaulter.of(views, CacheUse(2)) is not None


def test_an_engine_has_its_next_blocks_ready() -> None:
    llm = LLM("bundled", num_threads=1, kv_cache_memory_bytes=4 * LEAST_AHEAD)
    executor: Any = llm.engine.executor
    prefaulter = executor._runner._prefaulter
    assert prefaulter is not None
    prompt = list(range(300, 800))
    outputs = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    wait_for(lambda: prefaulter.ready_bytes >= LEAST_AHEAD)
    again = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    usage = llm.engine.scheduler.memory.usage()
    assert prefaulter._range.used >= 500 // 16 * usage.num_bytes // usage.num_blocks
