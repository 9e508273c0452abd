"""What would be given back, and lost, if sequences were released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.sequence_blocks import SequenceBlocks


class Release(NamedTuple):
    """What sequences hold for themselves, and what would be lost with it.

    Args:
        freed_bytes: bytes of the blocks that nobody else holds.
        lost_tokens: computed tokens behind the leading blocks that others hold too. An estimate from above: published
            blocks may still be found, until somebody takes them.
    """

    freed_bytes: int
    lost_tokens: int


def measure_release(groups: Sequence[CacheGroup], states: Sequence[SequenceBlocks]) -> Release:
    """Return what the blocks of live sequences amount to.

    Args:
        groups: the cache groups.
        states: of the sequences, on the device; what they share among themselves counts as their own.
    """
    freed_bytes = 0
    kept = [state.num_computed for state in states]
    for idx, group in enumerate(groups):
        tables = [state.tables[idx] for state in states]
        holders = Counter(chain.from_iterable(tables))
        # Null entries need not be found again, as blocks of others need not.
        del holders[NULL_BLOCK]
        own = {block_id for block_id, count in holders.items() if group.pool.ref_counts[block_id] == count}
        freed_bytes += len(own) * group.spec.bytes_per_block
        for which, table in enumerate(tables):
            first = next((block_idx for block_idx, block_id in enumerate(table) if block_id in own), len(table))
            if group.spec.is_recurrent and first < len(table):
                # All tokens are summed up in the one state.
                first = 0
            kept[which] = min(kept[which], first * group.spec.block_size)
    return Release(freed_bytes, sum(state.num_computed for state in states) - sum(kept))
