"""A stem of the prefix tree (`quire.memory.prefix_tree`): blocks that follow each other, and what branches off them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from quire.memory.chain import TOKEN_BYTES, TokenChain, block_digest, digests_of, num_common

if TYPE_CHECKING:
    from quire.memory.prefix_tree import PrefixTree

Place = tuple["Stem", int]


class Stem:
    """Blocks that follow each other, and where others part from them.

    Args:
        tree: that it belongs to.
        parent: the stem that it branches off; None for a root, and once it is taken out.
        first: the place of its first block in a sequence.
        base: the digest before its first block.
        name: of a root its namespace; else the digest of the first block, under which the parent has it.

    Attributes:
        length: blocks, none of a root.
        data: their tokens as bytes.
        entries: by position, what a block keeps of media.
        blocks: for each slot, the published blocks by position; 0 or nothing where there is none.
        num_published: of all slots.
        branches: by position, the stems whose first block comes there instead, by the digest of that block.
        children: the published blocks that come at a position, the youngest last: the stems that they are of, this one
            too, with the token that they begin with; only where some are, and there is a branch.
        unseen: positions of which no block was ever published.
        epoch: rises when positions go, and when the stem does.
    """

    __slots__ = (
        "_base",
        "_digests",
        "blocks",
        "branches",
        "children",
        "data",
        "entries",
        "epoch",
        "first",
        "length",
        "name",
        "num_published",
        "parent",
        "tree",
        "unseen",
    )

    def __init__(self, tree: PrefixTree, parent: Stem | None, first: int, base: bytes, name: bytes) -> None:
        self.tree = tree
        self.parent = parent
        self.first = first
        self.name = name
        self.length = 0
        self.data = bytearray()
        self.entries: dict[int, bytes] = {}
        self.blocks: list[list[int]] = [[] for _ in range(tree.num_slots)]
        self.num_published = 0
        self.branches: dict[int, dict[bytes, Stem]] = {}
        self.children: dict[int, dict[Stem, bytes]] = {}
        self.unseen: set[int] = set()
        self.epoch = 0
        self._base = base
        self._digests = [] if parent is None else [name]

    @property
    def is_tail(self) -> bool:
        """Say whether its one block is not full."""
        return 0 < len(self.data) < self.tree.block_bytes

    def content(self, position: int) -> bytes:
        """Return what a block holds: see `TokenChain.content`."""
        size = self.tree.block_bytes
        tokens = bytes(self.data[position * size : (position + 1) * size])
        return tokens + self.entries.get(position, b"") if self.entries else tokens

    def digest(self, position: int) -> bytes:
        """Return the digest of a block."""
        return self.digest_before(position + 1)

    def digest_before(self, position: int) -> bytes:
        """Return the digest before a block."""
        known = len(self._digests)
        if known < position:
            block_size = self.tree.block_bytes // TOKEN_BYTES
            parent = self._digests[-1] if known else self._base
            self._digests += digests_of(parent, self.data, self.entries, block_size, known, position)
        return self._digests[position - 1] if position else self._base

    def block_at(self, slot: int, position: int) -> int:
        """Return the block that is published at a position, or 0."""
        blocks = self.blocks[slot]
        return blocks[position] if position < len(blocks) else 0

    def num_equal(self, chain: TokenChain, start: int, end: int) -> int:
        """Return how many of a chain's blocks `[start, end)`, of which the chain knows, are the stem's own."""
        position, size = start - self.first, self.tree.block_bytes
        count = min(end - start, self.length - position)
        mine = self.data[position * size : (position + count) * size]
        theirs = chain.data[start * size : (start + count) * size]
        if mine != theirs:
            count = num_common(mine, theirs) * TOKEN_BYTES // size
        if self.entries or chain.entries:
            own, others = self.entries.get, chain.entries.get
            count = next((idx for idx in range(count) if own(position + idx) != others(start + idx)), count)
        return count

    def branch(self, position: int, content: bytes) -> Stem | None:
        """Return the branch at a position whose first block has a content."""
        if position not in self.branches:
            return None
        found = self.branches[position].get(block_digest(self.digest_before(position), content))
        return found if found is not None and found.content(0) == content else None

    def new_branch(self, position: int, content: bytes) -> Stem | None:
        """Make a branch, without blocks, for one that begins with a content; None where its digest is taken."""
        base = self.digest_before(position)
        digest = block_digest(base, content)
        others = self.branches.setdefault(position, {})
        if digest in others:
            return None
        others[digest] = stem = Stem(self.tree, self, self.first + position, base, digest)
        return stem

    def extend(self, chain: TokenChain, start: int, end: int) -> None:
        """Take over a chain's blocks `[start, end)`, of which the chain knows, behind the stem's last."""
        size = self.tree.block_bytes
        self.tree.num_growths += 1
        self.data += chain.data[start * size : end * size]
        self.length += end - start
        if chain.entries:
            own = {idx - self.first: entry for idx, entry in chain.entries.items() if start <= idx < end}
            self.entries.update(own)

    def children_at(self, position: int, limit: int, first: bytes | None = None) -> list[Place]:
        """Return the published blocks that come at a position, in the slot that the tree notes: the youngest first.

        Args:
            position: behind a block, or 0 of a root.
            limit: the most to look at.
            first: return only those without media that begin with this token.
        """
        children = self.children.get(position)
        if children is None:
            slot = self.tree.noted
            if slot is None or not self.block_at(slot, position):
                return []
            children = {self: self._first_token(position)}
        stems = [stem for stem, token in islice(reversed(children.items()), limit) if first in (None, token)]
        return [(stem, position if stem is self else 0) for stem in stems]

    def add_child(self, position: int, stem: Stem) -> None:
        """Note that the block of a stem that comes at a position is published."""
        if position not in self.children:
            if stem is self and position not in self.branches:
                return
            own = [] if stem is self else self.children_at(position, 1)
            self.children[position] = {known: self._first_token(position) for known, _ in own}
        self.children[position][stem] = stem._first_token(position if stem is self else 0)

    def drop_child(self, position: int, stem: Stem) -> None:
        """Note that the block of a stem that comes at a position is published no more."""
        others = self.children.get(position)
        if others is not None:
            del others[stem]
            if not others:
                del self.children[position]

    def _first_token(self, position: int) -> bytes:
        """Return the token that a block begins with, nothing of one with media."""
        start = position * self.tree.block_bytes
        return b"" if position in self.entries else bytes(self.data[start : start + TOKEN_BYTES])

    def trim(self) -> None:
        """Let go of the last positions where no block and no branch is left; of the stem, where that is all."""
        end = self.length
        if self.num_published:
            while end not in self.branches and not any(any(blocks[end - 1 : end]) for blocks in self.blocks):
                end -= 1
        else:
            end = max(self.branches, default=0)
        if not end and not self.branches:
            self.tree.take_out(self)
        elif end < self.length:
            self.epoch += 1
            self.length = end
            del self.data[end * self.tree.block_bytes :], self._digests[end:]
            for blocks in self.blocks:
                del blocks[end:]
            self.entries = {idx: entry for idx, entry in self.entries.items() if idx < end}
            self.unseen = {position for position in self.unseen if position < end}
