"""Snapshots of recurrent states: the lengths at which they are taken, and their publication.

A state is one block, which every step overwrites. A snapshot publishes that block; copy-on-write does the rest: the
next step finds a published block, and copies it before the write.

```
 tokens   |<------ 512 ------>|<------ 512 ------>|<- prompt ->|<- decoded ...
 state    ................... S ................. S ........ S .............. S     S: a snapshot, if a step ends there
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import PrefixHit
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.publish import merge

DEFAULT_SNAPSHOT_INTERVAL = 512


class Snapshots(NamedTuple):
    """The snapshots of a manager's recurrent groups.

    Args:
        recurrent_groups: indices of the recurrent groups.
        interval: number of tokens between regular snapshots, a multiple of the block size.
    """

    recurrent_groups: tuple[int, ...]
    interval: int

    @classmethod
    def of(cls, groups: Sequence[CacheGroup], interval: int | None) -> Snapshots:
        """Return the snapshots of groups; the default interval is a multiple of the block size."""
        size = groups[0].spec.block_size
        if interval is None:
            interval = -(-DEFAULT_SNAPSHOT_INTERVAL // size) * size
        if interval < 1 or interval % size:
            raise ValueError(f"snapshot_interval must be a positive multiple of the block size {size}, got {interval}")
        return cls(tuple(idx for idx, group in enumerate(groups) if group.spec.is_recurrent), interval)

    def snapshot_points_of(self, chain: TokenChain, hit: PrefixHit, block_size: int) -> tuple[int, ...]:
        """Return the lengths at which a new sequence takes snapshots in addition to the regular ones."""
        if not self.recurrent_groups:
            return ()
        last = max(0, len(chain.tokens) - 1) // block_size * block_size
        return tuple(sorted({point for point in (last, hit.diverged_at) if point > hit.num_tokens}))

    def next_after(self, num_tokens: int, snapshot_points: Iterable[int]) -> int:
        """Return the next length at which a snapshot is taken."""
        regular = (num_tokens // self.interval + 1) * self.interval
        return min((point for point in snapshot_points if num_tokens < point < regular), default=regular)

    def is_due(self, state: SequenceBlocks) -> bool:
        """Return whether a snapshot is taken at the present length of a sequence."""
        return state.num_slots == state.num_computed and self.is_point(state)

    def is_point(self, state: SequenceBlocks) -> bool:
        """Return whether a snapshot is taken at the number of slots of a sequence, once all of them are computed."""
        return state.num_slots % self.interval == 0 or state.num_slots in state.snapshot_points

    def publish(self, groups: Sequence[CacheGroup], state: SequenceBlocks) -> int:
        """Publish a sequence's states, or merge them with published duplicates; lower earlier snapshots' priority."""
        chain = state.chain
        block_idx = state.num_computed // groups[0].spec.block_size - 1
        tree = groups[0].pool.index.tree
        if tree.insert(chain, block_idx + 1, block_idx) <= block_idx:
            state.is_publishing = False
            return 0
        position = tree.match(chain, block_idx + 1).position(block_idx)
        num_merges = 0
        for idx in self.recurrent_groups:
            table, pool = state.tables[idx], groups[idx].pool
            published_id = pool.index.at(position)
            if published_id == NULL_BLOCK:
                pool.index.put(position, table[block_idx])
            else:
                merge(groups[idx], state, idx, block_idx, published_id)
                num_merges += 1
        self._supersede(groups, state)
        return num_merges

    def _supersede(self, groups: Sequence[CacheGroup], state: SequenceBlocks) -> None:
        """Lower the retention priority of the snapshots before a sequence's newest one.

        The next turn of a conversation continues from the newest. A regular snapshot supersedes the regular one before
        it; a snapshot at a snapshot point also supersedes the snapshot that the sequence opened on. Snapshots at branch
        points of prompts keep their priority.
        """
        newest = state.num_computed
        older = [state.regular_snapshot]
        state.regular_snapshot = 0 if newest in state.snapshot_points else newest
        if newest in state.snapshot_points:
            older.append(state.opened_on)
            state.opened_on = 0
        for num_tokens in older:
            num_blocks = num_tokens // groups[0].spec.block_size
            if 0 < num_tokens < newest and num_blocks not in state.branch_points:
                self._lower(groups, state.chain, num_blocks)

    def _lower(self, groups: Sequence[CacheGroup], chain: TokenChain, num_blocks: int) -> None:
        """Lower the priority of idle snapshots after a chain's first blocks, unless prompts diverge there."""
        if groups[0].pool.index.tree.partings(chain, num_blocks, num_blocks + 1):
            return
        for idx in self.recurrent_groups:
            pool = groups[idx].pool
            for block_id in pool.index.published(chain, num_blocks - 1, num_blocks):
                pool.set_priority(block_id, RetentionPriority.LOW)
