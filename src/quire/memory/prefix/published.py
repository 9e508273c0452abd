"""The published blocks of a pool, and their positions in the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from quire.memory.prefix.radix_node import NULL_BLOCK, NodePosition, RadixNode
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.prefix.token_chain import TokenChain


class PublicationObserver(Protocol):
    """Listens to the published blocks of one pool, and changes nothing."""

    def on_publish(self, node: RadixNode, start: int, count: int) -> None:
        """Record that blocks were published at positions of a node."""

    def on_withdraw(self, node: RadixNode, positions: Sequence[int]) -> None:
        """Record that the blocks at some positions of a node are about to be withdrawn."""

    def on_clear(self) -> None:
        """Record that all blocks were withdrawn."""


class PublishedBlocks:
    """The published blocks of one pool: at most one at each position of the tree, and each at one position.

    The tree maps a position to its block; this class has the inverse map, from a block to its position.

    Invariants: M4.
    """

    __slots__ = ("_nodes", "_num_published", "_pool_idx", "_positions", "observer", "tree")

    def __init__(self, tree: RadixTree, pool_idx: int, num_ids: int) -> None:
        self.tree = tree
        self._pool_idx = pool_idx
        # Node of each block, None if it is not published, and the position in that node.
        self._nodes: list[RadixNode | None] = [None] * num_ids
        self._positions = [0] * num_ids
        self._num_published = 0
        self.observer: PublicationObserver | None = None

    def __len__(self) -> int:
        return self._num_published

    def __contains__(self, block_id: int) -> bool:
        return self._nodes[block_id] is not None

    @property
    def num_ids(self) -> int:
        """Number of blocks of the pool, the null block included."""
        return len(self._nodes)

    # ---- queries ----

    def at(self, where: NodePosition) -> int:
        """Return the block that is published at a position, or the null block."""
        node, position = where
        return node.block_at(self._pool_idx, position)

    def position_of(self, block_id: int) -> NodePosition | None:
        """Return the position where a block is published, None if it is not published."""
        node = self._nodes[block_id]
        return None if node is None else (node, self._positions[block_id])

    def content_of(self, block_id: int) -> bytes | None:
        """Return the content of a block, None if it is not published."""
        node = self._nodes[block_id]
        return None if node is None else node.content(self._positions[block_id])

    def nodes(self) -> list[RadixNode | None]:
        """Return the node of each block, None for a block that is not published."""
        return self._nodes.copy()

    def block_ids(self) -> list[int]:
        """Return all published blocks."""
        return [block_id for block_id in range(len(self._nodes)) if block_id in self]

    def split(self, block_ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Return the published blocks, and the other ones."""
        nodes = self._nodes
        if None not in {nodes[block_id] for block_id in block_ids}:
            return block_ids, []
        published = [block_id for block_id in block_ids if block_id in self]
        return published, [block_id for block_id in block_ids if block_id not in self]

    def view(self, chain: TokenChain, num_blocks: int) -> ChainView:
        """Return a view of a chain's first published blocks."""
        return ChainView(self, chain, num_blocks)

    def published(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return the published block for each of a chain's full blocks `[start, end)`; the null block for none."""
        block_ids: list[int] = []
        for node, first, last in self.tree.match(chain, end).ranges(start, end):
            block_ids += node.blocks[self._pool_idx][first:last]
            block_ids += [NULL_BLOCK] * (node.first + last - start - len(block_ids))
        return block_ids + [NULL_BLOCK] * (end - start - len(block_ids))

    def leading(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """Return the leading published blocks of a chain, up to the first gap."""
        block_ids = self.published(chain, 0, num_blocks)
        return block_ids[: block_ids.index(NULL_BLOCK)] if NULL_BLOCK in block_ids else block_ids

    def holds(self, chain: TokenChain, block_idx: int) -> bool:
        """Return whether a chain's block is published, with or without the blocks before it."""
        return self.published(chain, block_idx, block_idx + 1) != [NULL_BLOCK]

    # ---- commands ----

    def put(self, where: NodePosition, block_id: int) -> None:
        """Publish a block at a position without a block of the pool."""
        node, position = where
        self._put(node, position, (block_id,))

    def put_ranges(self, ranges: Iterable[tuple[RadixNode, int, int]], block_ids: Sequence[int]) -> None:
        """Publish consecutive blocks at positions without a block of the pool."""
        start = 0
        for node, first, last in ranges:
            self._put(node, first, block_ids[start : start + last - first])
            start += last - first

    def remove(self, block_ids: Sequence[int]) -> None:
        """Withdraw published blocks."""
        nodes, positions = self._nodes, self._positions
        self._num_published -= len(block_ids)
        holders = [nodes[block_id] for block_id in block_ids]
        withdrawn = [positions[block_id] for block_id in block_ids]
        for block_id in block_ids:
            nodes[block_id] = None
        if holders and holders.count(holders[0]) == len(holders):
            self._remove(holders[0], withdrawn)
            return
        for node, run in groupby(zip(holders, withdrawn, strict=True), key=itemgetter(0)):
            self._remove(node, [position for _, position in run])

    def move(self, src_id: int, dst_id: int) -> None:
        """Move a published block's position to block `dst_id`; an unpublished block is ignored."""
        node = self._nodes[src_id]
        if node is not None:
            position = self._positions[src_id]
            self._nodes[src_id] = None
            self._nodes[dst_id], self._positions[dst_id] = node, position
            node.replace(self._pool_idx, position, dst_id)

    def clear(self) -> None:
        """Unpublish all blocks; the owner of the tree also clears the tree."""
        self._nodes = [None] * self.num_ids
        self._num_published = 0
        if self.observer is not None:
            self.observer.on_clear()

    def _remove(self, node: RadixNode | None, positions: list[int]) -> None:
        """Withdraw the blocks at some positions of one node."""
        assert node is not None, "only published blocks can be removed"
        if self.observer is not None:
            self.observer.on_withdraw(node, positions)
        node.unpublish(self._pool_idx, positions)
        self.tree.add_tombstones(node, len(positions))

    def _put(self, node: RadixNode, start: int, block_ids: Sequence[int]) -> None:
        """Publish blocks at the positions of one node from `start` on."""
        nodes, positions = self._nodes, self._positions
        node.publish(self._pool_idx, start, block_ids)
        for position, block_id in enumerate(block_ids, start):
            nodes[block_id] = node
            positions[block_id] = position
        self._num_published += len(block_ids)
        if self.observer is not None:
            self.observer.on_publish(node, start, len(block_ids))


class ChainView:
    """The published blocks of one chain in one pool; implements `quire.memory.specs.PublishedRun`."""

    __slots__ = ("_chain", "_index", "_leading", "_num_blocks")

    def __init__(self, index: PublishedBlocks, chain: TokenChain, num_blocks: int) -> None:
        self._index = index
        self._chain = chain
        self._num_blocks = num_blocks
        self._leading: list[int] | None = None

    def leading(self, limit: int) -> int:
        """Return the number of leading blocks, at most `limit`, that are all published."""
        if self._leading is None:
            self._leading = self._index.leading(self._chain, self._num_blocks)
        return min(len(self._leading), limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        block_ids = self._index.published(self._chain, start, end) if start < end else []
        return end - 1 - block_ids[::-1].index(NULL_BLOCK) if NULL_BLOCK in block_ids else -1

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published."""
        if self._leading is not None and end <= len(self._leading):
            return tuple(self._leading[start:end])
        return tuple(self._index.published(self._chain, start, end)) if start < end else ()
