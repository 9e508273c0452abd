"""A node of the compressed radix tree of published prefixes (`quire.memory.prefix.radix_tree`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from quire.memory.prefix.token_chain import TOKEN_BYTES, TokenChain, block_digest, digests_of, num_common

NULL_BLOCK = 0


class TreeLayout(NamedTuple):
    """Properties that all nodes of one tree share.

    Args:
        block_bytes: bytes of one block's token ids.
        num_pools: number of pools that publish blocks in the tree.
        child_index_pool: index of the pool whose children are indexed; None if child look-ups are not needed.
    """

    block_bytes: int
    num_pools: int
    child_index_pool: int | None


class RadixNode:
    """A run of consecutive blocks, and the branches that diverge from it.

    Only `publish`, `unpublish` and `replace` change the published blocks of a node.

    Args:
        layout: layout of the tree.
        parent: node that this one branches off; None for a root, and after the node was removed.
        first: index of the node's first block in a sequence.
        root_digest: digest of the namespace.
        name: key under which the node is found: the namespace of a root, else `name_of_branch` of its first block.

    Attributes:
        namespace: encoded namespace, which is the root's name; it stays when the node is removed.
        length: number of blocks; 0 for a root.
        data: token ids of the blocks, as bytes.
        entries: position -> media entries of the block.
        blocks: published block of each pool at each position; 0, or no item, for none.
        num_published: number of published blocks of all pools.
        branches: position -> nodes whose first block is an alternative at that position, by their names.
        children: position -> nodes (this one included) with a published block there, mapped to that block's first
            token; the most recently published last. Only positions with a branch and a published block.
        never_published: positions at which no block was published since they were added.
        version: counter, incremented when positions are dropped and when the node is removed.
    """

    __slots__ = (
        "_base",
        "_digests",
        "blocks",
        "branches",
        "children",
        "data",
        "entries",
        "first",
        "layout",
        "length",
        "name",
        "namespace",
        "never_published",
        "num_published",
        "parent",
        "root_digest",
        "version",
    )

    def __init__(
        self, layout: TreeLayout, parent: RadixNode | None, first: int, root_digest: bytes, name: bytes
    ) -> None:
        self.layout = layout
        self.parent = parent
        self.namespace: bytes = name if parent is None else parent.namespace
        self.first = first
        self.root_digest = root_digest
        self.name = name
        self.length = 0
        self.data = bytearray()
        self.entries: dict[int, bytes] = {}
        self.blocks: list[list[int]] = [[] for _ in range(layout.num_pools)]
        self.num_published = 0
        self.branches: dict[int, dict[bytes, RadixNode]] = {}
        self.children: dict[int, dict[RadixNode, bytes]] = {}
        self.never_published: set[int] = set()
        self.version = 0
        # The digest before the first block, computed on demand, and the digests of the leading blocks.
        self._base = root_digest if parent is None else None
        self._digests: list[bytes] = []

    # ---- questions ----

    @property
    def is_tail(self) -> bool:
        """True if the node is a tail: one block that is not full."""
        return 0 < len(self.data) < self.layout.block_bytes

    def content(self, position: int) -> bytes:
        """Return the content of a block; see `TokenChain.content`."""
        size = self.layout.block_bytes
        tokens = bytes(self.data[position * size : (position + 1) * size])
        return tokens + self.entries.get(position, b"") if self.entries else tokens

    def digest(self, position: int) -> bytes:
        """Return the digest of a block."""
        return self.digest_before(position + 1)

    def digest_before(self, position: int) -> bytes:
        """Return the digest of the prefix before a block."""
        return self.digests(position)[position - 1] if position else self._digest_before_all()

    def digests(self, end: int) -> list[bytes]:
        """Return the digests of the first blocks, at least `end` of them; do not change the list."""
        num_known = len(self._digests)
        if num_known < end:
            block_size = self.layout.block_bytes // TOKEN_BYTES
            parent = self._digests[-1] if num_known else self._digest_before_all()
            self._digests += digests_of(parent, self.data, self.entries, block_size, num_known, end)
        return self._digests

    def name_of_branch(self, content: bytes) -> bytes:
        """Return the name of a branch whose first block has this content.

        All branches at a position follow the same prefix, so the name does not cover it: a sequence that ends need not
        have all of its blocks hashed. The name is a keyed hash, since the namespace's digest is.
        """
        return block_digest(self.root_digest, content)

    def _digest_before_all(self) -> bytes:
        """Return the digest before the first block."""
        if self._base is None:
            # A loop, not recursion: the path may have as many nodes as a prompt has blocks.
            path = [self]
            while (parent := path[-1].parent) is not None and parent._base is None:
                path.append(parent)
            for node in reversed(path):
                assert node.parent is not None, "a node that is removed has no digest"
                node._base = node.parent.digest_before(node.first - node.parent.first)
        assert self._base is not None, "just computed"
        return self._base

    def block_at(self, pool_idx: int, position: int) -> int:
        """Return the block that a pool has published at a position, or the null block."""
        blocks = self.blocks[pool_idx]
        return blocks[position] if position < len(blocks) else NULL_BLOCK

    def num_equal(self, chain: TokenChain, start: int, end: int) -> int:
        """Return the number of leading blocks of a chain's encoded blocks `[start, end)` that equal this node's."""
        position, size = start - self.first, self.layout.block_bytes
        count = min(end - start, self.length - position)
        mine = self.data[position * size : (position + count) * size]
        theirs = chain.data[start * size : (start + count) * size]
        if mine != theirs:
            count = num_common(mine, theirs) * TOKEN_BYTES // size
        if self.entries or chain.entries:
            own_entry, chain_entry = self.entries.get, chain.entries.get
            count = next((idx for idx in range(count) if own_entry(position + idx) != chain_entry(start + idx)), count)
        return count

    def branch(self, position: int, content: bytes) -> RadixNode | None:
        """Return the branch at a position whose first block has this content, None without one."""
        if position not in self.branches:
            return None
        node = self.branches[position].get(self.name_of_branch(content))
        return node if node is not None and node.content(0) == content else None

    def children_at(self, position: int, limit: int, first: bytes | None = None) -> list[NodePosition]:
        """Return the blocks of the indexed pool that are published at a position, the most recent first.

        Args:
            position: position after a block, or 0 of a root.
            limit: maximum number of blocks to look at.
            first: encoded token that the blocks must begin with, which excludes blocks with media; None for any.
        """
        children = self.children.get(position)
        if children is None:
            pool_idx = self.layout.child_index_pool
            if pool_idx is None or not self.block_at(pool_idx, position):
                return []
            children = {self: self._first_token(position)}
        latest = islice(reversed(children.items()), limit)
        nodes = [node for node, token in latest if token == first or first is None]
        return [(node, position if node is self else 0) for node in nodes]

    # ---- commands: positions ----

    def add_branch(self, position: int, content: bytes) -> RadixNode | None:
        """Add a branch without blocks, for a first block with this content; None if its name is taken."""
        name = self.name_of_branch(content)
        others = self.branches.setdefault(position, {})
        if name in others:
            return None
        others[name] = node = RadixNode(self.layout, self, self.first + position, self.root_digest, name)
        return node

    def extend(self, chain: TokenChain, start: int, end: int) -> None:
        """Append the positions of a chain's blocks `[start, end)`, which the chain has already encoded."""
        size = self.layout.block_bytes
        self.data += chain.data[start * size : end * size]
        self.length += end - start
        if chain.entries:
            entries = {idx - self.first: entry for idx, entry in chain.entries.items() if start <= idx < end}
            self.entries.update(entries)

    def trim(self) -> bool:
        """Drop the last positions, as far as they have no published block and no branch.

        Returns:
            True if the node has nothing left and is to be removed; then no position is dropped.
        """
        end = self.length
        if self.num_published:
            while end not in self.branches and not any(any(blocks[end - 1 : end]) for blocks in self.blocks):
                end -= 1
        else:
            end = max(self.branches, default=0)
        if not end and not self.branches:
            return True
        if end < self.length:
            self.version += 1
            self.length = end
            del self.data[end * self.layout.block_bytes :], self._digests[end:]
            for blocks in self.blocks:
                del blocks[end:]
            self.entries = {idx: entry for idx, entry in self.entries.items() if idx < end}
            self.never_published = {position for position in self.never_published if position < end}
        return False

    # ---- commands: published blocks ----

    def publish(self, pool_idx: int, start: int, block_ids: Sequence[int]) -> None:
        """Publish a pool's blocks at the positions from `start` on, which have no block of that pool."""
        end, blocks = start + len(block_ids), self.blocks[pool_idx]
        if len(blocks) < start:
            blocks += [NULL_BLOCK] * (start - len(blocks))
        blocks[start:end] = block_ids
        self.num_published += len(block_ids)
        if self.never_published:
            self.never_published.difference_update(range(start, end))
        if pool_idx == self.layout.child_index_pool:
            if not start and self.parent is not None:
                self.parent.add_child(self.first - self.parent.first, self)
            for position in self.branches:
                if start <= position < end:
                    self.add_child(position, self)

    def unpublish(self, pool_idx: int, positions: Sequence[int]) -> None:
        """Unpublish a pool's blocks at some positions; the positions stay."""
        self.num_published -= len(positions)
        blocks = self.blocks[pool_idx]
        if self.num_published:
            for position in positions:
                blocks[position] = NULL_BLOCK
        else:
            blocks.clear()
        if pool_idx == self.layout.child_index_pool:
            if self.children:
                for position in positions:
                    self.drop_child(position, self)
            if self.parent is not None and 0 in positions:
                self.parent.drop_child(self.first - self.parent.first, self)

    def replace(self, pool_idx: int, position: int, block_id: int) -> None:
        """Replace the published block at a position by another one."""
        self.blocks[pool_idx][position] = block_id

    def add_child(self, position: int, node: RadixNode) -> None:
        """Index the block of a node that is published at a position."""
        if position not in self.children:
            if node is self and position not in self.branches:
                return
            published = [] if node is self else self.children_at(position, 1)
            self.children[position] = {child: self._first_token(position) for child, _ in published}
        self.children[position][node] = node._first_token(position if node is self else 0)

    def drop_child(self, position: int, node: RadixNode) -> None:
        """Drop the block of a node from the index of a position."""
        others = self.children.get(position)
        if others is not None:
            del others[node]
            if not others:
                del self.children[position]

    def _first_token(self, position: int) -> bytes:
        """Return the first token of a block, encoded; empty for a block with media."""
        start = position * self.layout.block_bytes
        return b"" if position in self.entries else bytes(self.data[start : start + TOKEN_BYTES])


# A position in the tree: the node and the index of the block in it.
NodePosition = tuple[RadixNode, int]
