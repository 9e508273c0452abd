"""What memory is used for, in blocks and in bytes."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.arena import Arena


class GroupUsage(NamedTuple):
    """Block counts of one cache group.

    Args:
        used: blocks with holders.
        idle: blocks without holders that are still published.
        free: blocks that hold nothing that can be hit, in slabs that the group has.
        num_slabs: slabs that the group has.
        bytes_per_block: bytes of a block.
    """

    used: int
    idle: int
    free: int
    num_slabs: int
    bytes_per_block: int


class Usage(NamedTuple):
    """Block counts of the device tier: `used + idle + free == num_blocks` (M1); and counters since the start.

    With one group, or groups whose blocks are alike, `num_blocks` is fixed. Else it depends on how the slabs are lent.

    Args:
        num_blocks: usable blocks, the null block not counted; a slab that no group has counts as one.
        used: blocks with holders.
        idle: blocks without holders that are still published: free to reuse and free to evict.
        free: blocks that hold nothing, slabs that no group has among them.
        num_sequences: live sequences.
        num_tokens: tokens with slots, a shared block's tokens counted for each holder.
        num_evictions: published blocks taken back for reuse.
        num_copies: blocks copied on write.
        num_merges: duplicate blocks given back when they filled.
        num_bytes: bytes of all blocks and slabs, the null block's not counted.
        used_bytes: of those, bytes of blocks with holders.
        lost_bytes: of those, bytes in lent slabs that blocks of the group's size leave over.
        groups: the counts of each cache group.
    """

    num_blocks: int
    used: int
    idle: int
    free: int
    num_sequences: int
    num_tokens: int
    num_evictions: int
    num_copies: int
    num_merges: int
    num_bytes: int
    used_bytes: int
    lost_bytes: int
    groups: tuple[GroupUsage, ...]

    @property
    def used_fraction(self) -> float:
        """Share of the bytes whose blocks have holders."""
        return self.used_bytes / self.num_bytes


def measure(arena: Arena, num_sequences: int, num_tokens: int, num_copies: int, num_merges: int) -> Usage:
    """Return how an arena is used; the other arguments are those of `Usage`."""
    layout = arena.layout
    groups = tuple(
        GroupUsage(
            pool.num_used,
            len(pool.idle),
            len(pool.free) + pool.num_retired,
            len(loan.used) if len(arena.pools) > 1 else layout.num_slabs,
            layout.block_bytes[idx],
        )
        for idx, (pool, loan) in enumerate(zip(arena.pools, arena.loans, strict=True))
    )
    used, idle = sum(group.used for group in groups), sum(group.idle for group in groups)
    free = sum(group.free for group in groups) + len(arena.free_slabs)
    block_bytes = sum((group.used + group.idle + group.free) * group.bytes_per_block for group in groups)
    return Usage(
        num_blocks=used + idle + free,
        used=used,
        idle=idle,
        free=free,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_evictions=sum(pool.num_evictions for pool in arena.pools),
        num_copies=num_copies,
        num_merges=num_merges,
        num_bytes=layout.num_slabs * layout.slab_bytes,
        used_bytes=sum(group.used * group.bytes_per_block for group in groups),
        lost_bytes=(layout.num_slabs - len(arena.free_slabs)) * layout.slab_bytes - block_bytes,
        groups=groups,
    )
