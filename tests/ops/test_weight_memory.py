"""Memory for packed weights: aligned, apart, and as much as was asked for."""

from __future__ import annotations

from quire.ops.interface.weight_memory import LINE_BYTES, SLAB_BYTES, WeightMemory
from quire.platform.huge_pages import HUGE_PAGE_BYTES


def test_parts_are_aligned_and_apart() -> None:
    memory = WeightMemory()
    parts = [memory.take(num_bytes) for num_bytes in (1, 64, 100, 0, 4097)]
    assert [len(part) for part in parts] == [1, 64, 100, 0, 4097]
    assert all(part.data_ptr() % LINE_BYTES == 0 for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts))


def test_slabs_start_at_a_huge_page_and_outlive_what_took_them() -> None:
    memory = WeightMemory()
    first, second = memory.take(3), memory.take(SLAB_BYTES - LINE_BYTES + 1)
    assert first.data_ptr() % HUGE_PAGE_BYTES == second.data_ptr() % HUGE_PAGE_BYTES == 0
    large = memory.take(SLAB_BYTES + 1)
    assert len(large) == SLAB_BYTES + 1
    first.fill_(7)
    del memory, second, large
    assert (first == 7).all()
