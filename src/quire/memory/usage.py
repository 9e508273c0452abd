"""Use of memory, in blocks and in bytes."""

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
        used: number of blocks with holders.
        idle: number of published blocks without holders.
        free: number of other blocks, in slabs of the group.
        num_slabs: number of slabs of the group.
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
        num_blocks: number of usable blocks; see `Usage` for more on all counts.
        used: number of blocks of swapped sequences.
        idle: number of published blocks without holders.
        free: number of other blocks.
        num_sequences: number of swapped sequences.
        num_evictions: number of published blocks that were evicted.
        num_swap_outs: number of blocks that swapping out copied from the device.
        num_swap_ins: number of blocks that swapping in copied to the device.
        num_demotions: number of published blocks that were copied from the device when it evicted them.
        num_promotions: number of blocks that were copied to the device for hits.
        num_bytes: bytes of all slabs, without the null block.
        used_bytes: bytes of blocks with holders.
        groups: counts of each cache group.
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

    With one group, or groups of equal blocks, `num_blocks` is fixed. Otherwise it depends on the groups' slabs.

    Args:
        num_blocks: number of usable blocks without the null block; a free slab counts as one.
        used: number of blocks with holders.
        idle: number of published blocks without holders, which can be hit or evicted.
        free: number of other blocks, free slabs included.
        num_sequences: number of live sequences, swapped ones included.
        num_tokens: number of tokens with slots on the device; tokens of a shared block count once for each holder.
        num_evictions: number of published blocks that were evicted.
        num_copies: number of copy-on-write copies.
        num_merges: number of duplicate blocks that were released when they filled.
        num_bytes: bytes of all slabs, without the null block.
        used_bytes: bytes of blocks with holders.
        lost_bytes: bytes of the groups' slabs that belong to no block of the group (alignment loss).
        saved_bytes: additional bytes that sequences and pins would hold if they shared no block.
        groups: counts of each cache group.
        host: usage of the host tier; None without a host tier.
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
        """Fraction of the bytes whose blocks have holders."""
        return self.used_bytes / self.num_bytes


def used_fraction(arena: Arena) -> float:
    """Return the fraction of the bytes whose blocks have holders, without the other counts."""
    layout = arena.layout
    used_bytes = sum([pool.num_used * size for pool, size in zip(arena.pools, layout.block_bytes, strict=True)])
    return used_bytes / (layout.num_slabs * layout.slab_bytes)


def measure(tables: BlockTables, num_merges: int) -> Usage:
    """Return the use of the tiers."""
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
    """Return the number of blocks of a group that sequences and pins hold, each counted once for each holder."""
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
            slabs.num_slabs if len(arena.pools) > 1 else arena.layout.num_slabs,
            arena.layout.block_bytes[idx],
        )
        for idx, (pool, slabs) in enumerate(zip(arena.pools, arena.group_slabs, strict=True))
    )


def _count_blocks(arena: Arena, groups: Sequence[GroupUsage]) -> tuple[int, int, int]:
    """Return the numbers of used, idle and free blocks of all groups; a free slab counts as a free block."""
    used, idle, free = (sum(counts) for counts in zip(*(group[:3] for group in groups), strict=True))
    return used, idle, free + len(arena.free_slabs)
