"""Admission checks: the number of blocks of every group that a new sequence needs at its peak, and whether they fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from quire.memory.capacity.sizing import peak_blocks_per_group
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.arena import Arena
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.results import AllocStatus, PrefixHit, Verdict
from quire.memory.sequence_blocks import SequenceBlocks


def check_admission(
    arena: Arena,
    groups: Sequence[CacheGroup],
    num_tokens: int,
    hit: PrefixHit,
    step_tokens: int,
    reserved: Sequence[int],
    num_kept_free: int,
) -> AllocStatus:
    """Return OK or LATER for a new sequence that opens on a hit and grows to `num_tokens`; NEVER is excluded before."""
    # Idle blocks of the hit become used without an allocation: `needs` includes them, the result of `check_fit` not.
    woken, loads = count_woken(groups, hit), count_loads(groups, hit)
    needs = []
    for group, shared, num_woken, num_loads, count in zip(groups, hit.block_ids, woken, loads, reserved, strict=True):
        peak = group.spec.peak_blocks(num_tokens, step_tokens)
        # A write after the used part of a partial block copies it, unless the block is idle now: then it is
        # written in place.
        is_copied = hit.num_copied > 0 and group.pool.ref_counts[shared[-1]] > 0
        missing = group.spec.num_blocks(num_tokens) - len(shared) + num_loads + is_copied
        needs.append(num_woken + min(peak - num_woken, missing) + count)
    return check_fit(arena, needs, woken, num_kept_free)


def count_woken(groups: Sequence[CacheGroup], hit: PrefixHit) -> list[int]:
    """Return for each group the number of a hit's idle blocks."""
    if not hit.num_tokens:
        return [0] * len(groups)
    return [
        [group.pool.ref_counts[block_id] for block_id in shared].count(0) - shared.count(NULL_BLOCK)
        for group, shared in zip(groups, hit.block_ids, strict=True)
    ]


def count_loads(groups: Sequence[CacheGroup], hit: PrefixHit) -> list[int]:
    """Return for each group the number of a hit's blocks that must be loaded from the host."""
    counts = [0] * len(groups)
    for load in hit.loads:
        counts[load.group_idx] += 1
    return counts


def check_fit(arena: Arena, needs: Sequence[int], woken: Sequence[int], num_kept_free: int = 0) -> AllocStatus:
    """Return OK or LATER, with the counts of the group with the fewest blocks left."""
    available_blocks = arena.available_blocks(needs, num_kept_free)
    left = [room - need for room, need in zip(available_blocks, needs, strict=True)]
    idx = left.index(min(left))
    verdict = Verdict.OK if needs[idx] <= available_blocks[idx] else Verdict.LATER
    return AllocStatus(verdict, idx, needs[idx] - woken[idx], available_blocks[idx] - woken[idx])


def never_fits(
    arena: Arena,
    groups: Sequence[CacheGroup],
    num_tokens: int,
    num_slabs: int,
    *,
    width: int = 1,
    num_shared: int = 0,
) -> AllocStatus | None:
    """Return NEVER if `width` sequences could not reach `num_tokens` even alone, one token a step; else None."""
    specs = [group.spec for group in groups]
    worst = peak_blocks_per_group(specs, num_tokens, arena.layout, num_slabs, width=width, num_shared=num_shared)
    return None if worst is None else refuse_blocks(arena, worst, num_slabs)


def refuse_blocks(arena: Arena, blocks: Sequence[int], num_slabs: int) -> AllocStatus | None:
    """Return NEVER if `blocks`, the number of blocks of each group, fill more than `num_slabs` slabs; else None."""
    filled = arena.layout.filled(blocks)
    if sum(filled) <= num_slabs:
        return None
    idx = filled.index(max(filled))
    could_have = max(0, filled[idx] - (sum(filled) - num_slabs))
    return AllocStatus(Verdict.NEVER, idx, blocks[idx], could_have * arena.layout.blocks_per_slab[idx])


class Release(NamedTuple):
    """The memory that a set of sequences holds exclusively, and the tokens that would be lost with it.

    Args:
        freed_bytes: bytes of the blocks without other holders.
        lost_tokens: number of computed tokens after the leading blocks with other holders. An upper bound: published
            blocks can still be hit until they are evicted.
    """

    freed_bytes: int
    lost_tokens: int


def measure_release(groups: Sequence[CacheGroup], states: Sequence[SequenceBlocks]) -> Release:
    """Return the memory and the tokens that releasing live sequences would free and lose."""
    freed_bytes = 0
    num_left = [state.num_computed for state in states]
    for idx, group in enumerate(groups):
        tables = [state.tables[idx] for state in states]
        holders = Counter(chain.from_iterable(tables))
        # Null entries and blocks with other holders are not lost.
        del holders[NULL_BLOCK]
        unshared_ids = {block_id for block_id, count in holders.items() if group.pool.ref_counts[block_id] == count}
        freed_bytes += len(unshared_ids) * group.spec.bytes_per_block
        for state_idx, table in enumerate(tables):
            first = next(
                (block_idx for block_idx, block_id in enumerate(table) if block_id in unshared_ids), len(table)
            )
            if group.spec.is_recurrent and first < len(table):
                # Without the only state, all tokens of the sequence are lost.
                first = 0
            num_left[state_idx] = min(num_left[state_idx], first * group.spec.block_size)
    return Release(freed_bytes, sum(state.num_computed for state in states) - sum(num_left))
