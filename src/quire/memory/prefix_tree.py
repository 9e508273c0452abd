"""The prefix tree: all prefixes that are published, and some that were.

```
 root --- [ a ][ b ][ c ][ d ]            a stem: blocks of whoever published them first, one after the other
                    |
                    +--- [ x ][ y ]       a branch: a prompt that parted after two blocks
                    +--- [ z              a tail: the last block of a sequence that ended before it was full
```

A place in the tree, a stem and a position in it, is the identity of a block: it stands for all content from the
namespace on. To find a sequence's place, contents are compared, a whole stem at a time. Only where stems part is
something looked up, by a keyed digest of the first block of a branch, whose content is compared too. So long prompts
take few steps, and a collision is a miss.

The tree knows blocks by number and does not care who holds them. Each pool (of a cache group on a tier) has a slot in
it: for each place the block that is published there, or 0. All of them share the tree, so what is found in one is known
for all. Places of which no block is left stay until others have gone since: so a hit that ends there can say why, and
what comes after them is still found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from quire.memory.chain import TOKEN_BYTES, Root, TokenChain
from quire.memory.stem import Place, Stem


class Trail:
    """Where a chain's blocks are in a tree, as far as somebody looked.

    Args:
        tree: the tree.
        stems: from the root on; none where the namespace has nothing.
        num_known: blocks that are in the tree, published or not.
        epoch: the last stem's; once that has another, the trail is none.

    Attributes:
        num_growths: of the tree when it had nothing more of the chain; -1 where nobody looked so far.
    """

    __slots__ = ("epoch", "num_growths", "num_known", "stems", "tree")

    def __init__(self, tree: PrefixTree, stems: list[Stem], num_known: int = 0, epoch: int = 0) -> None:
        self.tree = tree
        self.stems = stems
        self.num_known = num_known
        self.epoch = epoch
        self.num_growths = -1

    def copy(self) -> Trail:
        """Return one that goes its own way."""
        return Trail(self.tree, self.stems.copy(), self.num_known, self.epoch)

    def place(self, block_idx: int) -> Place:
        """Return where a known block is."""
        stem = next(stem for stem in reversed(self.stems) if stem.first <= block_idx)
        return stem, block_idx - stem.first

    def place_after(self, num_blocks: int) -> Place:
        """Return where comes what follows some known blocks; there is a root at least."""
        if not num_blocks:
            return self.stems[0], 0
        stem, position = self.place(num_blocks - 1)
        return stem, position + 1

    def parts(self, start: int, end: int) -> Iterator[tuple[Stem, int, int]]:
        """Yield the stems of the known blocks `[start, end)`, with the positions of the first and behind the last."""
        stems = self.stems
        for idx, stem in enumerate(stems):
            first = max(start, stem.first)
            last = min(end, self.num_known if idx + 1 == len(stems) else stems[idx + 1].first)
            if first < last:
                yield stem, first - stem.first, last - stem.first


class PrefixTree:
    """The prefixes of one manager.

    Args:
        block_size: tokens of a block.
        num_slots: pools that publish.
        noted: the slot that is asked for what comes after a block; None where nobody asks.

    Attributes:
        block_bytes: of the tokens of a block.
        num_remembered: places to remember of which blocks have gone.
        num_growths: times that places were added.
        roots: by namespace.

    Invariants: M4.
    """

    __slots__ = ("_gone", "_num_gone", "block_bytes", "noted", "num_growths", "num_remembered", "num_slots", "roots")

    def __init__(self, block_size: int, num_slots: int, noted: int | None) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.num_slots = num_slots
        self.noted = noted
        self.num_remembered = 0
        self.num_growths = 0
        self.roots: dict[bytes, Stem] = {}
        # Stems of which blocks have gone, and how many, in this order; some may be back.
        self._gone: deque[tuple[Stem, int]] = deque()
        self._num_gone = 0

    def clear(self) -> None:
        """Forget all prefixes; what chains know of their places is no longer valid."""
        for stem in self.stems():
            stem.epoch += 1
        self.roots.clear()
        self._gone.clear()
        self._num_gone = 0

    def root(self, root: Root) -> Stem | None:
        """Return the stem that all of a namespace branch off, None where it has nothing."""
        return self.roots.get(root.content)

    def walk(self, chain: TokenChain, num_blocks: int) -> Trail:
        """Return where a chain's blocks are: at least of the first `num_blocks` those that are in the tree."""
        trail = chain.trail
        if trail is None or trail.tree is not self or not trail.stems or trail.stems[-1].epoch != trail.epoch:
            root = self.roots.get(chain.root.content)
            trail = chain.trail = Trail(self, [] if root is None else [root], 0, 0 if root is None else root.epoch)
        if trail.num_known >= num_blocks or not trail.stems or trail.num_growths == self.num_growths:
            return trail
        chain.know(num_blocks)
        stem, known = trail.stems[-1], trail.num_known
        while True:
            if known - stem.first < stem.length:
                known += stem.num_equal(chain, known, num_blocks)
            if known == num_blocks or known - stem.first not in stem.branches:
                break
            branch = stem.branch(known - stem.first, chain.content(known))
            if branch is None:
                break
            trail.stems.append(branch)
            stem = branch
        trail.num_known, trail.epoch = known, stem.epoch
        if known < num_blocks:
            trail.num_growths = self.num_growths
        return trail

    def partings(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return the numbers of blocks, of `[start, end)`, behind which a chain's path and another are known to part.

        Tails are no paths of their own: whoever goes on from one goes the same way.
        """
        trail, found = self.walk(chain, end), []
        stems = trail.stems
        for idx, stem in enumerate(stems):
            if not stem.branches:
                continue
            last = stems[idx + 1].first if idx + 1 < len(stems) else trail.num_known
            for num_blocks in range(max(start, stem.first), min(end, last + 1)):
                branches = stem.branches.get(num_blocks - stem.first)
                if branches is not None:
                    ways = (branch for branch in branches.values() if not branch.is_tail)
                    # The stem's own next block is a way too.
                    if sum(1 for _ in islice(ways, 2)) + (num_blocks - stem.first < stem.length) > 1:
                        found.append(num_blocks)
        return found

    def grow(self, chain: TokenChain, num_blocks: int, num_seen: int) -> int:
        """See that a chain's first blocks have places.

        Args:
            chain: whose blocks.
            num_blocks: of them.
            num_seen: those from there on are about to be published; before them there may be places without blocks.

        Returns:
            How many of the blocks, `num_blocks` or more, have places: fewer where a digest collides.
        """
        trail = self.walk(chain, num_blocks)
        known = trail.num_known
        if known >= num_blocks:
            return num_blocks
        if not trail.stems:
            self._plant(trail, chain.root)
        chain.know(num_blocks)
        stem = trail.stems[-1]
        if known - stem.first < stem.length or stem.parent is None:
            branch = stem.new_branch(known - stem.first, chain.content(known))
            if branch is None:
                return known
            trail.stems.append(branch)
            stem = branch
        stem.extend(chain, known, num_blocks)
        if known < num_seen:
            stem.unseen.update(range(known - stem.first, min(num_seen, num_blocks) - stem.first))
        trail.num_known, trail.epoch = num_blocks, stem.epoch
        return num_blocks

    def grow_tail(self, chain: TokenChain, num_blocks: int, content: bytes) -> Stem | None:
        """Make a tail behind a chain's first blocks; None where a digest collides."""
        if self.grow(chain, num_blocks, num_blocks) < num_blocks:
            return None
        trail = self.walk(chain, num_blocks)
        if not trail.stems:
            self._plant(trail, chain.root)
        stem, position = trail.place_after(num_blocks)
        tail = stem.new_branch(position, content)
        if tail is not None:
            tail.data += content
            tail.length = 1
        return tail

    def note_gone(self, stem: Stem, count: int) -> None:
        """Note that so many blocks of a stem are published no more; what was noted first is forgotten as more go."""
        if stem.is_tail:
            if not stem.num_published:
                self.take_out(stem)
            return
        self._gone.append((stem, count))
        self._num_gone += count
        while self._num_gone > self.num_remembered:
            oldest, count = self._gone.popleft()
            self._num_gone -= count
            if oldest.parent is not None:
                oldest.trim()

    def take_out(self, stem: Stem) -> None:
        """Take a stem out that has nothing left; what it branches off may have nothing left then, either."""
        while stem.parent is not None:
            stem.epoch += 1
            parent, stem.parent = stem.parent, None
            position = stem.first - parent.first
            del parent.branches[position][stem.name]
            if not parent.branches[position]:
                del parent.branches[position]
            if parent.num_published or parent.branches:
                if not parent.num_published:
                    parent.trim()
                return
            # In a loop: as many may branch off each other as a prompt has blocks.
            stem = parent
        stem.epoch += 1
        del self.roots[stem.name]

    def _plant(self, trail: Trail, root: Root) -> None:
        """Make the root of a namespace that has nothing, for whoever looked for it."""
        stem = self.roots[root.content] = Stem(self, None, 0, root.digest, root.content)
        trail.stems.append(stem)
        trail.epoch = stem.epoch

    def stems(self) -> list[Stem]:
        """Return all stems, each behind the one that it branches off."""
        stems = list(self.roots.values())
        for stem in stems:
            for _, branches in sorted(stem.branches.items()):
                stems += branches.values()
        return stems

    def snapshot(self) -> tuple[object, ...]:
        """Return all that is in the tree as a comparable value."""
        shown = self.stems()
        names = {stem: name for name, stem in enumerate(shown)}
        return (
            tuple(self.roots),
            tuple(
                (
                    None if stem.parent is None else names[stem.parent],
                    stem.first,
                    bytes(stem.data),
                    tuple(sorted(stem.entries.items())),
                    tuple(tuple(blocks) for blocks in stem.blocks),
                    tuple((position, tuple(names[one] for one in there)) for position, there in stem.children.items()),
                    tuple(sorted(stem.unseen)),
                )
                for stem in shown
            ),
            tuple((names.get(stem), count) for stem, count in self._gone),
        )
