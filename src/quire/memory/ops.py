"""What the data plane must learn of memory: bytes to move before a step's kernels run, and changed block tables."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy a whole block (all layers of the group, K and V) from `src_id` to `dst_id` of one cache group."""

    group_idx: int
    src_id: int
    dst_id: int


class MemoryOps(NamedTuple):
    """Ordered byte movements; a later one may read what an earlier one wrote, so they are never reordered."""

    copies: tuple[BlockCopy, ...] = ()


class TableDelta(NamedTuple):
    """How one cache group's block table of one sequence changed: `table[start:] = block_ids`.

    Appends, copy-on-write, merges of duplicates and truncation (then without ids) are all of this form.
    """

    group_idx: int
    start: int
    block_ids: tuple[int, ...]


NO_OPS = MemoryOps()
