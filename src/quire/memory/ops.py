"""What the data plane must learn of memory: bytes to move before a step's kernels run, and changed block tables."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Where blocks lie."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class StoredBlock(NamedTuple):
    """What a published block is, in a form that outlives the process.

    Args:
        group_idx: the cache group.
        digest: its identity.
        tokens: the content of the block: its token ids, and its media entry behind them.
        parent: the identity of the block before it, or of the namespace.
    """

    group_idx: int
    digest: bytes
    tokens: bytes
    parent: bytes


class BlockCopy(NamedTuple):
    """Copy a whole block of one cache group (all layers, K and V, or their states).

    Args:
        group_idx: the group.
        src_id, dst_id: block ids, each of its own tier. From disk: the ticket under which the block was read. To disk:
            the place of what it is in `MemoryOps.saves`.
        src_tier, dst_tier: where the blocks lie.
    """

    group_idx: int
    src_id: int
    dst_id: int
    src_tier: Tier = Tier.DEVICE
    dst_tier: Tier = Tier.DEVICE


class FetchedBlock(NamedTuple):
    """A block of a chain that was read from disk and found whole.

    Args:
        group_idx: the cache group.
        block_idx: its place in the chain.
        ticket: the number under which the data plane has its bytes.
    """

    group_idx: int
    block_idx: int
    ticket: int


class MemoryOps(NamedTuple):
    """Ordered byte movements; a later one may read what an earlier one wrote, so they are never reordered.

    Args:
        copies: the movements.
        saves: what those are that go to disk.
    """

    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[StoredBlock, ...] = ()


class TableDelta(NamedTuple):
    """How one cache group's block table of one sequence changed: `table[start:] = block_ids`.

    Appends, copy-on-write, merges of duplicates and truncation (then without ids) are all of this form.
    """

    group_idx: int
    start: int
    block_ids: tuple[int, ...]


NO_OPS = MemoryOps()
