"""Copies of a failed step, which may not have been made.

The progress of a failed step is unknown. So the targets of all of its copies are treated as garbage, on both tiers:
blocks that were demoted, promoted, swapped, loaded from disk, copied on write or moved. All other blocks are unchanged:
copies write to their targets only, and a step's kernels only to blocks of the step's sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.pool.pool import BlockPool
from quire.memory.results import MemoryOps, Tier
from quire.memory.tables.tables import BlockTables


class Holders(NamedTuple):
    """The sequences and pins that hold target blocks of copies.

    Args:
        seq_ids: live sequences, on either tier.
        pins: names of pins.
    """

    seq_ids: tuple[int, ...]
    pins: tuple[str, ...]


class LostCopies:
    """Commands after a failed step."""

    __slots__ = ("_tables",)

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def holders_of(self, ops: MemoryOps) -> Holders:
        """Return the live sequences and pins that hold targets of copies."""
        targets = _targets(ops)
        seq_ids = tuple(
            seq_id
            for seq_id, state in self._tables.sequences.items()
            if any(
                not block_ids.isdisjoint(state.tables_on(tier)[idx])
                or (tier is Tier.DEVICE and state.checkpoint and state.checkpoint.block_ids.get(idx) in block_ids)
                for (tier, idx), block_ids in targets.items()
            )
        )
        pins = tuple(
            name
            for name in self._tables.pins.names()
            if any(
                tier is Tier.DEVICE and not block_ids.isdisjoint(self._tables.pins.blocks_of(name, idx))
                for (tier, idx), block_ids in targets.items()
            )
        )
        return Holders(seq_ids, pins)

    def discard(self, ops: MemoryOps) -> None:
        """Unpublish the targets of copies that may not have been made."""
        published: list[tuple[BlockPool, list[int]]] = []
        for (tier, idx), block_ids in _targets(ops).items():
            pool = self._tables.groups_on(tier)[idx].pool
            published_ids = sorted(block_id for block_id in block_ids if block_id in pool.index)
            if any(pool.ref_counts[block_id] for block_id in published_ids):
                raise ValueError(
                    f"discarded blocks must have no holders, but some of {published_ids} of group {idx} have"
                )
            published.append((pool, published_ids))
        self._tables.version += 1
        for pool, published_ids in published:
            pool.discard(published_ids)
        if self._tables.observer is not None:
            self._tables.observer.copies_discarded(ops)


def _targets(ops: MemoryOps) -> dict[tuple[Tier, int], set[int]]:
    """Return the blocks that copies write, by tier and cache group."""
    targets: dict[tuple[Tier, int], set[int]] = {}
    for copy in ops.copies:
        if copy.dst_tier is not Tier.DISK:
            targets.setdefault((copy.dst_tier, copy.group_idx), set()).add(copy.dst_id)
    return targets
