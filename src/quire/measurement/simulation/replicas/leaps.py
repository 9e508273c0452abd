"""Leaps: decoding steps of a simulated replica that are simulated together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.memory.manager import KVCacheManager
from quire.sequences.sequence import Sequence


class Leap(NamedTuple):
    """Decoding steps that are simulated together: the start of the first one, and the end of each."""

    start_s: float
    ends_s: list[float]


def num_steps_with_room(memory: KVCacheManager, running: Seq[Sequence], most: int) -> int:
    """Return the number of steps, at most `most`, for which all running sequences get slots without preemption."""
    size, states = memory.block_size, memory.sequences
    filled = [states[sequence.seq_id].num_slots for sequence in running]
    pool = memory.groups[0].pool
    # An eviction to the host is a copy, which takes time in its step, so with a host tier only free blocks count.
    room = len(pool.free) if memory.host is not None else len(pool.ref_counts) - 1 - pool.num_used

    def num_blocks(count: int) -> int:
        return sum([(slots + count - 1) // size - (slots - 1) // size for slots in filled])

    # A quick test: a sequence takes at most one block more than its new tokens fill.
    if len(filled) * (1 + most // size) <= room or num_blocks(most) <= room:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_blocks(middle) <= room else (low, middle)
    return low
