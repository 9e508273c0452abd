"""The prefix index: which of a pool's blocks are published, and where in the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from quire.memory.prefix_tree import PrefixTree
from quire.memory.stem import Place, Stem

if TYPE_CHECKING:
    from quire.memory.chain import TokenChain

NULL_BLOCK = 0


class PrefixIndex:
    """The published blocks of one pool, one block a place and one place a block.

    Args:
        tree: of all pools of a manager.
        slot: the pool's in it.
        num_ids: blocks of the pool, the null block included.

    Attributes:
        tree: as given.

    Invariants: M4.
    """

    __slots__ = ("_num_published", "_positions", "_slot", "_stems", "tree")

    def __init__(self, tree: PrefixTree, slot: int, num_ids: int) -> None:
        self.tree = tree
        self._slot = slot
        # By block: the node where it is published, None where it is not, and the position in that.
        self._stems: list[Stem | None] = [None] * num_ids
        self._positions = [0] * num_ids
        self._num_published = 0

    def __len__(self) -> int:
        return self._num_published

    def __contains__(self, block_id: int) -> bool:
        return self._stems[block_id] is not None

    @property
    def num_ids(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._stems)

    # ---- questions ----

    def at(self, place: Place) -> int:
        """Return the block that is published at a place, or the null block."""
        stem, position = place
        return stem.block_at(self._slot, position)

    def place_of(self, block_id: int) -> Place | None:
        """Return where a block is published, None when it is not."""
        stem = self._stems[block_id]
        return None if stem is None else (stem, self._positions[block_id])

    def content_of(self, block_id: int) -> bytes | None:
        """Return what a published block holds, None when it is not published."""
        place = self.place_of(block_id)
        return None if place is None else place[0].content(place[1])

    def block_ids(self) -> list[int]:
        """Return all published blocks."""
        return [block_id for block_id in range(len(self._stems)) if block_id in self]

    def split(self, block_ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Return the blocks that are published, and those that are not."""
        stems = self._stems
        if None not in {stems[block_id] for block_id in block_ids}:
            return block_ids, []
        published = [block_id for block_id in block_ids if block_id in self]
        return published, [block_id for block_id in block_ids if block_id not in self]

    def view(self, chain: TokenChain, num_blocks: int) -> ChainView:
        """Return what this index holds of a chain's first blocks."""
        return ChainView(self, chain, num_blocks)

    def published(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return which blocks hold a chain's full blocks `[start, end)`; the null block for those not published."""
        found: list[int] = []
        for stem, first, last in self.tree.walk(chain, end).parts(start, end):
            found += stem.blocks[self._slot][first:last]
            found += [NULL_BLOCK] * (stem.first + last - start - len(found))
        return found + [NULL_BLOCK] * (end - start - len(found))

    def leading(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """Return the blocks that hold a chain's first blocks without a gap.

        Args:
            chain: whose blocks.
            num_blocks: full blocks of the chain, the most to return.
        """
        found = self.published(chain, 0, num_blocks)
        return found[: found.index(NULL_BLOCK)] if NULL_BLOCK in found else found

    def holds(self, chain: TokenChain, block_idx: int) -> bool:
        """Say whether a chain's block is published, whatever is before it."""
        return self.published(chain, block_idx, block_idx + 1) != [NULL_BLOCK]

    # ---- commands ----

    def put(self, place: Place, block_id: int) -> None:
        """Publish a block at a place where none is."""
        stem, position = place
        self._put(stem, position, (block_id,))

    def put_parts(self, parts: Iterable[tuple[Stem, int, int]], block_ids: Sequence[int]) -> None:
        """Publish blocks, one after the other, at places where none is.

        Args:
            parts: of stems, with the positions of the first and behind the last.
            block_ids: as many as they have positions.
        """
        start = 0
        for stem, first, last in parts:
            self._put(stem, first, block_ids[start : start + last - first])
            start += last - first

    def remove(self, block_ids: Sequence[int]) -> None:
        """Take published blocks out of the index."""
        stems, positions = self._stems, self._positions
        self._num_published -= len(block_ids)
        names = [stems[block_id] for block_id in block_ids]
        gone = [positions[block_id] for block_id in block_ids]
        for block_id in block_ids:
            stems[block_id] = None
        if names and names.count(names[0]) == len(names):
            self._remove(names[0], gone)
            return
        for stem, run in groupby(zip(names, gone, strict=True), key=itemgetter(0)):
            self._remove(stem, [position for _, position in run])

    def move(self, src_id: int, dst_id: int) -> None:
        """Publish another block in place of one, if that is published at all."""
        place = self.place_of(src_id)
        if place is not None:
            self._stems[src_id] = None
            self._stems[dst_id], self._positions[dst_id] = place
            place[0].blocks[self._slot][place[1]] = dst_id

    def clear(self) -> None:
        """Have nothing published; the owner of the tree clears that too."""
        self._stems = [None] * self.num_ids
        self._num_published = 0

    def _remove(self, stem: Stem | None, gone: list[int]) -> None:
        """Take the blocks at positions of a stem out."""
        assert stem is not None, "only what is published can be removed"
        stem.num_published -= len(gone)
        if stem.num_published:
            blocks = stem.blocks[self._slot]
            for position in gone:
                blocks[position] = NULL_BLOCK
        else:
            stem.blocks[self._slot].clear()
        if self._slot == self.tree.noted:
            if stem.children:
                for position in gone:
                    stem.drop_child(position, stem)
            if stem.parent is not None and 0 in gone:
                stem.parent.drop_child(stem.first - stem.parent.first, stem)
        self.tree.note_gone(stem, len(gone))

    def _put(self, stem: Stem, first: int, block_ids: Sequence[int]) -> None:
        """Publish blocks at the positions of a stem from `first` on."""
        stems, positions, slot = self._stems, self._positions, self._slot
        end, blocks = first + len(block_ids), stem.blocks[slot]
        if len(blocks) < first:
            blocks += [NULL_BLOCK] * (first - len(blocks))
        blocks[first:end] = block_ids
        for position, block_id in enumerate(block_ids, first):
            stems[block_id] = stem
            positions[block_id] = position
        stem.num_published += len(block_ids)
        self._num_published += len(block_ids)
        if stem.unseen:
            stem.unseen.difference_update(range(first, end))
        if slot == self.tree.noted:
            if not first and stem.parent is not None:
                stem.parent.add_child(stem.first - stem.parent.first, stem)
            for position in stem.branches:
                if first <= position < end:
                    stem.add_child(position, stem)


class ChainView:
    """One chain's published blocks in one index: what `quire.memory.specs.PublishedRun` asks for.

    Args:
        index: the index.
        chain: whose blocks.
        num_blocks: full blocks of the chain that may be asked about.
    """

    __slots__ = ("_chain", "_index", "_leading", "_num_blocks")

    def __init__(self, index: PrefixIndex, chain: TokenChain, num_blocks: int) -> None:
        self._index = index
        self._chain = chain
        self._num_blocks = num_blocks
        self._leading: list[int] | None = None

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are published without a gap."""
        if self._leading is None:
            self._leading = self._index.leading(self._chain, self._num_blocks)
        return min(len(self._leading), limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        found = self._index.published(self._chain, start, end) if start < end else []
        return end - 1 - found[::-1].index(NULL_BLOCK) if NULL_BLOCK in found else -1

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published."""
        if self._leading is not None and end <= len(self._leading):
            return tuple(self._leading[start:end])
        return tuple(self._index.published(self._chain, start, end)) if start < end else ()
