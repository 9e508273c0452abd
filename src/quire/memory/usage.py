"""What memory is used for, in blocks and in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.memory.groups.host_tier import HostTier
from quire.memory.pool.arena import Arena
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables


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


class HostUsage(NamedTuple):
    """Block counts of the host tier: `used + idle + free == num_blocks` (M1); and counters since the start.

    Args:
        num_blocks: usable blocks; see `Usage`, as for the others.
        used: blocks of sequences that are swapped out.
        idle: blocks without holders that are published.
        free: blocks that hold nothing.
        num_sequences: those that are swapped out.
        num_evictions: published blocks taken back for reuse.
        num_swap_outs: blocks copied from the device for sequences that were swapped out.
        num_swap_ins: blocks copied to the device when they came back.
        num_demotions: published blocks copied from the device before they were evicted there.
        num_promotions: blocks copied to the device for hits.
        num_bytes: bytes of all blocks and slabs.
        used_bytes: of those, bytes of blocks with holders.
        groups: the counts of each cache group.
    """

    num_blocks: int
    used: int
    idle: int
    free: int
    num_sequences: int
    num_evictions: int
    num_swap_outs: int
    num_swap_ins: int
    num_demotions: int
    num_promotions: int
    num_bytes: int
    used_bytes: int
    groups: tuple[GroupUsage, ...]


class Usage(NamedTuple):
    """Block counts of the device tier: `used + idle + free == num_blocks` (M1); and counters since the start.

    With one group, or groups whose blocks are alike, `num_blocks` is fixed. Else it depends on how the slabs are lent.

    Args:
        num_blocks: usable blocks, the null block not counted; a slab that no group has counts as one.
        used: blocks with holders.
        idle: blocks without holders that are still published: free to reuse and free to evict.
        free: blocks that hold nothing, slabs that no group has among them.
        num_sequences: live sequences, those that are swapped out among them.
        num_tokens: tokens with slots on the device, a shared block's tokens counted for each holder.
        num_evictions: published blocks taken back for reuse.
        num_copies: blocks copied on write.
        num_merges: duplicate blocks given back when they filled.
        num_bytes: bytes of all blocks and slabs, the null block's not counted.
        used_bytes: of those, bytes of blocks with holders.
        lost_bytes: of those, bytes in lent slabs that blocks of the group's size leave over.
        saved_bytes: what the holders of used blocks, sequences and pins, would take more if nobody shared one.
        groups: the counts of each cache group.
        host: the host tier, None without one.
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
    saved_bytes: int
    groups: tuple[GroupUsage, ...]
    host: HostUsage | None = None

    @property
    def used_fraction(self) -> float:
        """Share of the bytes whose blocks have holders."""
        return self.used_bytes / self.num_bytes


def used_fraction(arena: Arena) -> float:
    """Return the share of the bytes whose blocks have holders, without counting anything else."""
    layout = arena.layout
    used_bytes = sum([pool.num_used * size for pool, size in zip(arena.pools, layout.block_bytes, strict=True)])
    return used_bytes / (layout.num_slabs * layout.slab_bytes)


def measure(tables: BlockTables, num_merges: int) -> Usage:
    """Return how the tiers are used.

    Args:
        tables: of all sequences.
        num_merges: see `Usage`.
    """
    arena, host, states = tables.arena, tables.host, tuple(tables.sequences.values())
    on_device = [state for state in states if not state.is_swapped]
    layout, groups = arena.layout, _measure_groups(arena)
    used, idle, free = _count_blocks(arena, groups)
    block_bytes = sum((group.used + group.idle + group.free) * group.bytes_per_block for group in groups)
    return Usage(
        num_blocks=used + idle + free,
        used=used,
        idle=idle,
        free=free,
        num_sequences=len(states),
        num_tokens=sum(state.num_slots for state in on_device),
        num_evictions=sum(pool.num_evictions for pool in arena.pools),
        num_copies=tables.num_copies,
        num_merges=num_merges,
        num_bytes=layout.num_slabs * layout.slab_bytes,
        used_bytes=sum(group.used * group.bytes_per_block for group in groups),
        lost_bytes=(layout.num_slabs - len(arena.free_slabs)) * layout.slab_bytes - block_bytes,
        saved_bytes=sum(
            (_count_held(tables, on_device, idx) - group.used) * group.bytes_per_block
            for idx, group in enumerate(groups)
        ),
        groups=groups,
        host=None if host is None else _measure_host(host),
    )


def _count_held(tables: BlockTables, on_device: Sequence[SequenceBlocks], group_idx: int) -> int:
    """Return the blocks of a group that holders have, one that two of them hold counted twice."""
    num_held = sum(1 for _ in tables.pins.blocks(group_idx))
    for state in on_device:
        num_held += len(state.tables[group_idx]) - state.num_skipped[group_idx]
        num_held += state.checkpoint is not None and group_idx in state.checkpoint.block_ids
    return num_held


def _measure_host(host: HostTier) -> HostUsage:
    arena, traffic, groups = host.arena, host.traffic, _measure_groups(host.arena)
    used, idle, free = _count_blocks(arena, groups)
    return HostUsage(
        num_blocks=used + idle + free,
        used=used,
        idle=idle,
        free=free,
        num_sequences=host.num_sequences,
        num_evictions=sum(pool.num_evictions for pool in arena.pools),
        num_swap_outs=traffic.num_swap_outs,
        num_swap_ins=traffic.num_swap_ins,
        num_demotions=traffic.num_demotions,
        num_promotions=traffic.num_promotions,
        num_bytes=arena.layout.num_slabs * arena.layout.slab_bytes,
        used_bytes=sum(group.used * group.bytes_per_block for group in groups),
        groups=groups,
    )


def _measure_groups(arena: Arena) -> tuple[GroupUsage, ...]:
    return tuple(
        GroupUsage(
            pool.num_used,
            len(pool.idle),
            len(pool.free),
            loan.num_slabs if len(arena.pools) > 1 else arena.layout.num_slabs,
            arena.layout.block_bytes[idx],
        )
        for idx, (pool, loan) in enumerate(zip(arena.pools, arena.loans, strict=True))
    )


def _count_blocks(arena: Arena, groups: Sequence[GroupUsage]) -> tuple[int, int, int]:
    """Return the used, idle and free blocks of all groups, a slab that no group has as one."""
    used, idle, free = (sum(counts) for counts in zip(*(group[:3] for group in groups), strict=True))
    return used, idle, free + len(arena.free_slabs)
