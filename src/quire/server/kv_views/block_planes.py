"""The states of all blocks as bytes, and their changes between two scans, encoded as runs."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the server starts before the engine is imported
    from quire.engine.kv.block_map import BlockScan, PoolBlocks

# Bits of a block's state, below its number of holders.
PUBLISHED, PINNED, HOLDER = 1, 2, 4
# Above all of them, in `runs` alone: the block holds rows of media.
MEDIA = 256
MOST_HOLDERS = 63
CHUNK = 256
_HOLDERS = bytes(min(count, MOST_HOLDERS) * HOLDER for count in range(256))
_IS_NOT_ZERO = bytes(map(bool, range(256)))
# The state that a tenant sees for blocks of others: used, idle or free.
_OTHERS = bytes(HOLDER if state >= HOLDER else state & PUBLISHED for state in range(256))


class Planes(NamedTuple):
    """State of all blocks, pool after pool; a block's index is its cell in the map.

    Args:
        states: a byte for each block: its holders (up to 63) times 4, plus 2 if it is pinned, plus 1 if published.
        owners: number of the oldest request that holds a block, 4 bytes for each block; 0 for none.
        media: cells of the blocks that hold rows of media.
        pools: the pools that were packed.
    """

    states: bytes
    owners: memoryview
    media: frozenset[int]
    pools: tuple[PoolBlocks, ...]

    @classmethod
    def of(cls, scan: BlockScan, before: Planes | None = None) -> Planes:
        """Return the planes of a scan."""
        parts, starts, start = [], [], 0
        for idx, pool in enumerate(scan.pools):
            starts.append(start)
            end = start + len(pool.holders)
            old = None if before is None else (before.pools[idx], before.states[start:end])
            parts.append(_states_of(pool, old))
            start = end
        owners = array("I", bytes(4 * start))
        # The oldest request comes last, so it is the owner of a shared block.
        for table in sorted(scan.tables, key=lambda table: -table.number):
            first = starts[table.pool_idx]
            for block_id in table.block_ids:
                owners[first + block_id] = table.number
        for first in starts:
            owners[first] = 0  # the null block
        cells = zip(starts, scan.pools, strict=True)
        media = frozenset(first + block_id for first, pool in cells for block_id in pool.media)
        return cls(b"".join(parts), memoryview(owners.tobytes()).cast("I"), media, tuple(scan.pools))

    def changed(self, before: Planes | None) -> list[int]:
        """Return the cells that differ from earlier planes; without these, all cells that are not free."""
        if before is None:
            return [cell for cell, state in enumerate(self.states) if state]
        cells: list[int] = []
        for start in range(0, len(self.states), CHUNK):
            part = slice(start, start + CHUNK)
            if self.states[part] != before.states[part] or self.owners[part] != before.owners[part]:
                new = zip(self.states[part], self.owners[part], strict=True)
                old = zip(before.states[part], before.owners[part], strict=True)
                cells += [cell for cell, (now, then) in enumerate(zip(new, old, strict=True), start) if now != then]
        marked = self.media ^ before.media
        return sorted(marked.union(cells)) if marked else cells

    def runs(self, cells: Iterable[int], visible: set[int] | None) -> bytes:
        """Return cells as runs of equal ones: gap, length, state and owner, each as a LEB128 number."""

        def shown(cell: int) -> tuple[int, int]:
            state, owner = self.states[cell], self.owners[cell]
            if visible is not None and owner not in visible:
                return _OTHERS[state], 0
            return state | (MEDIA if cell in self.media else 0), owner

        packed = bytearray()
        end = 0
        for (state, owner, _), run in groupby(enumerate(cells), lambda item: (*shown(item[1]), item[1] - item[0])):
            same = [cell for _, cell in run]
            for number in (same[0] - end, len(same), state, owner):
                _put(packed, number)
            end = same[-1] + 1
        return bytes(packed)

    def recent(self, scan: BlockScan, visible: set[int] | None) -> dict[str, list[int]]:
        """Return the visible cells that were copied, merged and evicted since the previous scan."""
        cells_by_event: dict[str, list[int]] = {"copied": [], "merged": [], "evicted": []}
        start = 0
        for pool in scan.pools:
            for name, cells in cells_by_event.items():
                changed = [start + block_id for block_id in getattr(pool.recent, name, ())]
                cells += [cell for cell in changed if visible is None or self.owners[cell] in visible]
            start += len(pool.holders)
        return cells_by_event


def _states_of(pool: PoolBlocks, before: tuple[PoolBlocks, bytes] | None) -> bytes:
    """Return the states of a pool's blocks; unchanged chunks are copied from an earlier scan, which is cheaper."""
    if before is None or before[0].pinned != pool.pinned:
        states = bytearray(_pack(pool.holders, pool.published))
    else:
        old, old_states = before
        states = bytearray()
        for start in range(0, len(pool.holders), CHUNK):
            part = slice(start, start + CHUNK)
            holders, published = pool.holders[part], pool.published[part]
            is_same = holders == old.holders[part] and published == old.published[part]
            states += old_states[part] if is_same else _pack(holders, published)
    for block_id in pool.pinned:
        states[block_id] |= PINNED
    return bytes(states)


def _pack(holders: Sequence[int], published: Sequence[object]) -> bytes:
    # A holder count has the upper six bits, so that the flags never carry into it.
    counts = int.from_bytes(_to_bytes(holders).translate(_HOLDERS), "little")
    flags = int.from_bytes(bytes(map(bool, published)), "little")
    return (counts | flags).to_bytes(len(holders), "little")


def _to_bytes(counts: Sequence[int]) -> bytes:
    """Return each count as a byte, at most 255; Python code runs only for counts above 255."""
    try:
        return bytes(counts)
    except ValueError:
        wide = array("I", counts)
    if sys.byteorder == "big":
        wide.byteswap()
    packed = wide.tobytes()
    low = bytearray(packed[::4])
    high = b"".join((packed[part::4].translate(_IS_NOT_ZERO)) for part in (1, 2, 3))
    at = high.find(1)
    while at >= 0:
        low[at % len(counts)] = 255
        at = high.find(1, at + 1)
    return bytes(low)


def _put(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)
