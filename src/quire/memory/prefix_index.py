"""The prefix index: from a block's identity to the block that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from operator import eq, is_

from quire.memory.chain import Link, TokenChain
from quire.memory.departed import Departed
from quire.memory.siblings import Siblings


class PrefixIndex:
    """Maps identities to published blocks, one block each way.

    Args:
        num_remembered: identities that are remembered when their blocks have gone.
        has_siblings: whether somebody will ask for the blocks that follow one.

    Attributes:
        siblings: the published blocks by the block before them; None where nobody asks.
        departed: identities whose blocks have gone.

    Invariants: M4.
    """

    __slots__ = ("_block_ids", "_links", "departed", "siblings")

    def __init__(self, num_remembered: int = 0, *, has_siblings: bool = True) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._links: dict[int, Link] = {}
        self.siblings = Siblings() if has_siblings else None
        self.departed = Departed(num_remembered)

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._links

    def get(self, digest: bytes) -> tuple[int, Link] | None:
        """Return the block published under a digest, and its link, which the caller compares."""
        block_id = self._block_ids.get(digest)
        return None if block_id is None else (block_id, self._links[block_id])

    def num_new(self, digests: Sequence[bytes]) -> int:
        """Return how many of the first digests are under no published block, nor twice among themselves."""
        known = self._block_ids
        if known.keys().isdisjoint(digests) and len(set(digests)) == len(digests):
            return len(digests)
        seen: set[bytes] = set()
        for digest in digests:
            if digest in known or digest in seen:
                break
            seen.add(digest)
        return len(seen)

    def link_of(self, block_id: int) -> Link | None:
        """Return the link of a block, None when it is not published."""
        return self._links.get(block_id)

    def children(self, parent: bytes, limit: int) -> list[Link]:
        """Return the links of published blocks that follow one of a digest, the youngest first."""
        assert self.siblings is not None, "nobody was to ask for children"
        return list(map(self._links.__getitem__, self.siblings.of(parent, limit)))

    def add(self, link: Link, block_id: int) -> None:
        """Publish a block under a digest that no block has."""
        digest, _, parent = link
        assert parent is not None, "the root is no block"
        self._block_ids[digest] = block_id
        self._links[block_id] = link
        if self.siblings is not None:
            self.siblings.add(parent[0], block_id)

    def add_run(self, digests: Sequence[bytes], links: Sequence[Link], block_ids: list[int]) -> int:
        """Publish blocks, one after the other, up to the first under whose digest there is one.

        Args:
            digests: of the links.
            links: of the blocks, at least one; each has the one before it as its parent.
            block_ids: not published.

        Returns:
            How many are published.
        """
        known = self._block_ids
        held = list(map(known.setdefault, digests, block_ids))
        num_new = len(held)
        if held != block_ids:
            is_new = list(map(eq, held, block_ids))
            num_new = is_new.index(False)
            for digest in compress(digests[num_new:], is_new[num_new:]):
                del known[digest]
            digests, links, block_ids = digests[:num_new], links[:num_new], block_ids[:num_new]
        if num_new:
            self._links.update(zip(block_ids, links, strict=True))
            if self.siblings is not None:
                self.siblings.add_run([links[0][2][0], *digests[:-1]], block_ids)  # type: ignore[index]
        return num_new

    def remove(self, block_ids: Sequence[int]) -> None:
        """Take published blocks out of the index."""
        known = self._block_ids
        links = list(map(self._links.pop, block_ids))
        gone = [link[0] for link in links]
        for digest in gone:
            del known[digest]
        if self.siblings is not None:
            self.siblings.remove_run([link[2][0] for link in links], block_ids)  # type: ignore[index]
        self.departed.add(gone)

    def move(self, src_id: int, dst_id: int) -> None:
        """Publish another block in place of one, if that is published at all."""
        link = self._links.pop(src_id, None)
        if link is not None:
            if self.siblings is not None:
                self.siblings.remove(link[2][0], src_id)  # type: ignore[index]
            self.add(link, dst_id)

    def items(self) -> list[tuple[int, Link]]:
        """Return all published blocks and their links, in the order of publication."""
        return [(block_id, self._links[block_id]) for block_id in self._block_ids.values()]

    def split(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the blocks that are published, and those that are not."""
        links = self._links
        published = [block_id for block_id in block_ids if block_id in links]
        if len(published) == len(block_ids):
            return published, []
        return published, [block_id for block_id in block_ids if block_id not in links]

    def view(self, chain: TokenChain, num_blocks: int) -> ChainView:
        """Return what this index holds of a chain's first blocks."""
        return ChainView(self, chain, num_blocks)

    def leading(self, chain: TokenChain, num_blocks: int) -> list[int]:
        """Return the blocks that hold a chain's first blocks without a gap.

        Links are compared, so a colliding digest is a block that is not published (M4).

        Args:
            chain: whose blocks.
            num_blocks: full blocks of the chain, the most to return.
        """
        digests, known = chain.digests(num_blocks), self._block_ids
        if not num_blocks or digests[0] not in known:
            return []
        # Ends at the first digest that is not known, or with the last one.
        found = list(iter(map(known.get, islice(digests, num_blocks)).__next__, None))
        return found[: chain.recognise_run(list(map(self._links.__getitem__, found)))]

    def holds(self, chain: TokenChain, block_idx: int) -> bool:
        """Say whether a chain's block is published, whatever is before it; links are compared (M4)."""
        entry = self.get(chain.digests(block_idx + 1)[block_idx])
        return entry is not None and chain.recognises(block_idx, entry[1])

    def holds_run(self, chain: TokenChain, start: int, end: int) -> bool:
        """Say whether a chain's blocks `[start, end)`, at least one, are published one after the other."""
        digests = chain.digests(end)[start:end]
        if not self._block_ids.keys() >= set(digests):
            return False
        run = [self._links[self._block_ids[digest]] for digest in digests]
        return chain.recognises(end - 1, run[-1]) and all(map(is_, run, chain.links(end)[start:end]))

    def block_ids(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return the blocks that hold a chain's blocks `[start, end)`, all known to be published."""
        return [self._block_ids[digest] for digest in chain.digests(end)[start:end]]


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
        if start < end and self._index.holds_run(self._chain, start, end):
            return -1
        holds, chain = self._index.holds, self._chain
        return next((idx for idx in range(end - 1, start - 1, -1) if not holds(chain, idx)), -1)

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published."""
        if self._leading is not None and end <= len(self._leading):
            return tuple(self._leading[start:end])
        return tuple(self._index.block_ids(self._chain, start, end))
