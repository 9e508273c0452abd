"""The prefix tree: a compressed radix tree of all published prefixes, and of some that have been evicted.

```
 root --- [ a ][ b ][ c ][ d ]            a node: consecutive blocks of the first sequence that published them
                    |
                    +--- [ x ][ y ]       a branch: a prompt that diverged after two blocks
                    +--- [ z              a tail: the last, partly filled block of a sequence that ended
```

A node and a position in it identify a block with all blocks before it, from the namespace on. To match a chain,
contents are compared, a whole node at a time. Only at a branch is there a hash look-up, by a keyed digest of the
branch's first block, and the content of that block is also compared. So long prompts take few steps, matching computes
no digest of a whole prefix, and a collision is a miss.

The tree has block ids, but no reference counts. All pools (of each cache group on each tier) share it: a node has, for
each pool and position, the block that the pool has published there, or 0. Positions whose blocks were evicted stay as
tombstones, of which at most `max_tombstones` are kept: so a hit that ends there is known to end by eviction, and later
blocks can still be found.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from quire.memory.prefix.radix_node import NodePosition, RadixNode, TreeLayout
from quire.memory.prefix.token_chain import TOKEN_BYTES, Root, TokenChain


class PrefixCursor:
    """The positions of a chain's leading blocks in a tree, as far as they were matched; kept in `TokenChain.cursor`."""

    __slots__ = ("generation", "nodes", "num_known", "tree", "version")

    def __init__(self, tree: RadixTree, nodes: list[RadixNode], num_known: int = 0, version: int = 0) -> None:
        self.tree = tree
        self.nodes = nodes
        self.num_known = num_known
        self.version = version
        self.generation = -1

    def copy(self) -> PrefixCursor:
        """Return an independent copy."""
        return PrefixCursor(self.tree, self.nodes.copy(), self.num_known, self.version)

    def position(self, block_idx: int) -> NodePosition:
        """Return the position of a matched block."""
        node = next(node for node in reversed(self.nodes) if node.first <= block_idx)
        return node, block_idx - node.first

    def position_after(self, num_blocks: int) -> NodePosition:
        """Return the position after the first `num_blocks` matched blocks; the namespace must have a root."""
        if not num_blocks:
            return self.nodes[0], 0
        node, position = self.position(num_blocks - 1)
        return node, position + 1

    def ranges(self, start: int, end: int) -> list[tuple[RadixNode, int, int]]:
        """Return (node, first position, end position) of each node of the matched blocks `[start, end)`."""
        nodes, end = self.nodes, min(end, self.num_known)
        if start >= end:
            return []
        if start >= nodes[-1].first:
            return [(nodes[-1], start - nodes[-1].first, end - nodes[-1].first)]
        ranges = []
        for idx, node in enumerate(nodes):
            first = max(start, node.first)
            last = end if idx + 1 == len(nodes) else min(end, nodes[idx + 1].first)
            if first < last:
                ranges.append((node, first - node.first, last - node.first))
        return ranges


class RadixTree:
    """The prefixes of one manager.

    Attributes:
        has_media: True once a block with media was added.

    Invariants: M4.
    """

    __slots__ = ("_num_tombstones", "_tombstones", "generation", "has_media", "layout", "max_tombstones", "roots")

    def __init__(self, block_size: int, num_pools: int, child_index_pool: int | None) -> None:
        self.layout = TreeLayout(block_size * TOKEN_BYTES, num_pools, child_index_pool)
        self.max_tombstones = 0
        self.generation = 0
        self.has_media = False
        self.roots: dict[bytes, RadixNode] = {}
        # Nodes with the number of blocks that were withdrawn from them, oldest first. Some may be published again.
        self._tombstones: deque[tuple[RadixNode, int]] = deque()
        self._num_tombstones = 0

    def clear(self) -> None:
        """Remove all prefixes; the cursors of all chains become invalid."""
        for node in self.nodes():
            node.version += 1
        self.roots.clear()
        self.has_media = False
        self._tombstones.clear()
        self._num_tombstones = 0

    def match(self, chain: TokenChain, num_blocks: int) -> PrefixCursor:
        """Match a chain's leading blocks.

        This query caches: it advances the chain's cursor, and makes the chain encode the compared tokens.
        """
        cursor = chain.cursor
        if (
            not isinstance(cursor, PrefixCursor)
            or cursor.tree is not self
            or not cursor.nodes
            or cursor.nodes[-1].version != cursor.version
        ):
            root = self.roots.get(chain.root.content)
            cursor = PrefixCursor(self, []) if root is None else PrefixCursor(self, [root], 0, root.version)
            chain.cursor = cursor
        if cursor.num_known >= num_blocks or not cursor.nodes or cursor.generation == self.generation:
            return cursor
        chain.encode(num_blocks)
        node, num_known = cursor.nodes[-1], cursor.num_known
        while True:
            if num_known - node.first < node.length:
                num_known += node.num_equal(chain, num_known, num_blocks)
            if num_known == num_blocks or num_known - node.first not in node.branches:
                break
            branch = node.branch(num_known - node.first, chain.content(num_known))
            if branch is None:
                break
            cursor.nodes.append(branch)
            node = branch
        cursor.num_known, cursor.version = num_known, node.version
        if num_known < num_blocks:
            cursor.generation = self.generation
        return cursor

    def partings(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return the prefix lengths, in blocks and in `[start, end)`, at which another path diverges from a chain's.

        A tail is not another path: a sequence that continues it has the same path.
        """
        cursor, lengths = self.match(chain, end), []
        nodes = cursor.nodes
        for idx, node in enumerate(nodes):
            if not node.branches:
                continue
            last = nodes[idx + 1].first if idx + 1 < len(nodes) else cursor.num_known
            for num_blocks in range(max(start, node.first), min(end, last + 1)):
                branches = node.branches.get(num_blocks - node.first)
                if branches is not None:
                    paths = (branch for branch in branches.values() if not branch.is_tail)
                    # The node's own next block is a path too.
                    if sum(1 for _ in islice(paths, 2)) + (num_blocks - node.first < node.length) > 1:
                        lengths.append(num_blocks)
        return lengths

    def insert(self, chain: TokenChain, num_blocks: int, num_seen: int) -> int:
        """Add positions for a chain's leading blocks; return the number of blocks with one: fewer if a digest collides.

        New positions before `num_seen` are marked as never published: the caller publishes no blocks there.
        """
        cursor = self.match(chain, num_blocks)
        return num_blocks if cursor.num_known >= num_blocks else self.extend(cursor, chain, num_blocks, num_seen)

    def extend(self, cursor: PrefixCursor, chain: TokenChain, num_blocks: int, num_seen: int) -> int:
        """Insert the blocks of a chain after the blocks that `match` has found; see `insert`."""
        num_known = cursor.num_known
        if not cursor.nodes:
            self._add_root(cursor, chain.root)
        chain.encode(num_blocks)
        node = cursor.nodes[-1]
        if num_known - node.first < node.length or node.parent is None:
            branch = node.add_branch(num_known - node.first, chain.content(num_known))
            if branch is None:
                return num_known
            cursor.nodes.append(branch)
            node = branch
        self.generation += 1
        node.extend(chain, num_known, num_blocks)
        self.has_media |= bool(chain.media)
        if num_known < num_seen:
            node.never_published.update(range(num_known - node.first, min(num_seen, num_blocks) - node.first))
        cursor.num_known, cursor.version = num_blocks, node.version
        return num_blocks

    def insert_partial(self, chain: TokenChain, num_blocks: int, content: bytes) -> RadixNode | None:
        """Insert a tail after a chain's leading blocks and return its node; None if a digest collides."""
        if self.insert(chain, num_blocks, num_blocks) < num_blocks:
            return None
        cursor = self.match(chain, num_blocks)
        if not cursor.nodes:
            self._add_root(cursor, chain.root)
        node, position = cursor.position_after(num_blocks)
        tail = node.add_branch(position, content)
        if tail is not None:
            tail.data += content
            tail.length = 1
        return tail

    def add_tombstones(self, node: RadixNode, count: int) -> None:
        """Keep the positions of withdrawn blocks as tombstones; drop the oldest beyond `max_tombstones`."""
        if node.is_tail:
            if not node.num_published:
                self.remove(node)
            return
        self._tombstones.append((node, count))
        self._num_tombstones += count
        while self._num_tombstones > self.max_tombstones:
            oldest, count = self._tombstones.popleft()
            self._num_tombstones -= count
            if oldest.parent is not None and oldest.trim():
                self.remove(oldest)

    def remove(self, node: RadixNode) -> None:
        """Remove an empty node, and each ancestor that is empty then."""
        while node.parent is not None:
            node.version += 1
            parent, node.parent = node.parent, None
            position = node.first - parent.first
            del parent.branches[position][node.name]
            if not parent.branches[position]:
                del parent.branches[position]
            # A loop, not recursion: the path may have as many nodes as a prompt has blocks.
            if parent.num_published or not parent.trim():
                return
            node = parent
        node.version += 1
        del self.roots[node.name]

    def _add_root(self, cursor: PrefixCursor, root: Root) -> None:
        """Add the root node of a namespace that has none, and move a cursor of that namespace to it."""
        node = self.roots[root.content] = RadixNode(self.layout, None, 0, root.digest, root.content)
        cursor.nodes.append(node)
        cursor.version = node.version

    def nodes(self) -> list[RadixNode]:
        """Return all nodes, each after its parent."""
        nodes = list(self.roots.values())
        for node in nodes:
            for _, branches in sorted(node.branches.items()):
                nodes += branches.values()
        return nodes

    def snapshot(self) -> tuple[object, ...]:
        """Return the whole content of the tree as a comparable value."""
        shown = self.nodes()
        names = {node: name for name, node in enumerate(shown)}
        return (
            tuple(self.roots),
            tuple(
                (
                    None if node.parent is None else names[node.parent],
                    node.first,
                    bytes(node.data),
                    tuple(sorted(node.entries.items())),
                    tuple(tuple(blocks) for blocks in node.blocks),
                    tuple(
                        (position, tuple(names[one] for one in children))
                        for position, children in node.children.items()
                    ),
                    tuple(sorted(node.never_published)),
                )
                for node in shown
            ),
            tuple((names.get(node), count) for node, count in self._tombstones),
        )
