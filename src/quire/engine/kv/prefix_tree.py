"""The prefix tree as segments between its branches, read from the radix tree between two steps.

```
 a node with a branch at 2     [ a ][ b ][ c ][ d ]         three segments:   a b --+-- c d
                                        |                                           |
                                        +--- [ x ][ y ]                             +-- x y
```

The segments with the most holders come first, so a bounded part of the tree has the most shared prefixes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from itertools import count, islice
from typing import NamedTuple

from quire.engine.kv.block_map import groups_of
from quire.memory.manager import KVCacheManager
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.prefix.token_chain import TOKEN_BYTES, Namespace
from quire.scheduling.scheduler import Scheduler

MAX_SEGMENTS = 160
# Greatest number of nodes visited in one scan: bounds its time even if thousands branch off at one position.
MAX_VISITED = 1_000
NUM_LABEL_TOKENS = 12


class Segment(NamedTuple):
    """Consecutive blocks of the tree without a branch in between.

    Args:
        parent: index of the segment before it; None at the beginning of a prompt.
        first_token, end_token: positions of its tokens in a prompt, `[first_token, end_token)`.
        holders: reference count of its first block, the greatest over all cache groups and tiers.
        pool: index in `BlockScan.pools` of the first pool with its first block; None if the block was evicted.
        block: id of this block; 0 if it was evicted.
        num_children: number of segments that follow it, some of which may not be in the scan.
        label_ids: its first tokens; None if the viewer may not see them.
    """

    parent: int | None
    first_token: int
    end_token: int
    holders: int
    pool: int | None
    block: int
    num_children: int
    label_ids: list[int] | None


class TreeScan(NamedTuple):
    """A part of the prefix tree, each segment after its parent.

    Args:
        segments: the segments.
        is_whole: False if some were left out.
    """

    segments: tuple[Segment, ...]
    is_whole: bool


def scan_tree(scheduler: Scheduler, viewer: Namespace) -> TreeScan:
    """Return the prefix tree, as far as a viewer may see it, in a bounded number of segments and nodes.

    Args:
        scheduler: scheduler with the tree.
        viewer: namespace of the viewer. A viewer with a tenant sees the tenant's prefixes only; tokens are shown only
            for the viewer's own namespace, not for namespaces with a salt.
    """
    return _TreeScanner(scheduler.memory, viewer).scan()


class _TreeScanner:
    def __init__(self, memory: KVCacheManager, viewer: Namespace) -> None:
        self._tree = memory.groups[0].pool.index.tree
        self._pools = [group.pool for _, _, group in groups_of(memory)]
        self._block_size = memory.block_size
        self._viewer = viewer
        self._heap: list[tuple[int, int, int | None, bool, RadixNode]] = []
        self._order = count()
        self._num_visited = 0
        self._is_whole = True
        self._segments: list[Segment] = []

    def scan(self) -> TreeScan:
        viewer_name = self._viewer.serialise()
        for name, root in reversed(self._tree.roots.items()):
            if self._viewer.tenant in (None, Namespace.deserialise(name).tenant):
                self._push(root, 0, None, is_own=name == viewer_name)
        while self._heap:
            _, _, parent, is_own, node = heapq.heappop(self._heap)
            self._add_segments(node, parent, is_own=is_own)
        return TreeScan(tuple(self._segments), self._is_whole)

    def _push(self, node: RadixNode, position: int, parent: int | None, *, is_own: bool) -> None:
        """Queue the nodes that branch off at a position, the latest first."""
        branches = node.branches.get(position, {})
        room = MAX_VISITED - self._num_visited
        self._is_whole &= len(branches) <= room
        for branch in islice(reversed(branches.values()), room):
            self._num_visited += 1
            holders, _, _ = self._holders(branch, 0)
            heapq.heappush(self._heap, (-holders, next(self._order), parent, is_own, branch))

    def _add_segments(self, node: RadixNode, parent: int | None, *, is_own: bool) -> None:
        """Add the segments of a node, and queue the nodes that branch off each."""
        for start, end in self._cuts(node):
            if len(self._segments) == MAX_SEGMENTS:
                self._is_whole = False
                return
            holders, pool, block = self._holders(node, start)
            data = node.data[start * self._tree.layout.block_bytes : end * self._tree.layout.block_bytes]
            first = (node.first + start) * self._block_size
            num_children = len(node.branches.get(end, ())) + (end < node.length)
            ids = array("I", bytes(data[: NUM_LABEL_TOKENS * TOKEN_BYTES])).tolist() if is_own else None
            end_token = first + len(data) // TOKEN_BYTES
            self._segments.append(Segment(parent, first, end_token, holders, pool, block, num_children, ids))
            parent = len(self._segments) - 1
            self._push(node, end, parent, is_own=is_own)

    def _cuts(self, node: RadixNode) -> Iterator[tuple[int, int]]:
        """Yield the ranges of positions between a node's branches."""
        start = 0
        for end in (*heapq.nsmallest(MAX_SEGMENTS, node.branches), node.length):
            if start < end:
                yield start, end
                start = end

    def _holders(self, node: RadixNode, position: int) -> tuple[int, int | None, int]:
        """Return the greatest reference count at a position, the first pool with a block there, and that block."""
        blocks = [pool.index.at((node, position)) for pool in self._pools]
        holders = max(pool.ref_counts[block_id] for pool, block_id in zip(self._pools, blocks, strict=True))
        pool_idx = next((idx for idx, block_id in enumerate(blocks) if block_id != NULL_BLOCK), None)
        return holders, pool_idx, NULL_BLOCK if pool_idx is None else blocks[pool_idx]
