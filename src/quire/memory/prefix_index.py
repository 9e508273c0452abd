"""The prefix index: from a block's identity to the block that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.memory.chain import Link, TokenChain
from quire.memory.departed import Departed
from quire.memory.siblings import Siblings


class PrefixIndex:
    """Maps identities to published blocks, one block each way.

    Args:
        num_remembered: identities that are remembered when their blocks have gone.

    Attributes:
        siblings: the published blocks by the block before them.
        departed: identities whose blocks have gone.

    Invariants: M4.
    """

    __slots__ = ("_block_ids", "_links", "departed", "siblings")

    def __init__(self, num_remembered: int = 0) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._links: dict[int, Link] = {}
        self.siblings = Siblings()
        self.departed = Departed(num_remembered)

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._links

    def get(self, digest: bytes) -> tuple[int, Link] | None:
        """Return the block published under a digest, and its link, which the caller compares."""
        block_id = self._block_ids.get(digest)
        return None if block_id is None else (block_id, self._links[block_id])

    def num_new(self, links: Sequence[Link]) -> int:
        """Return how many of the first links have digests under which no block is published."""
        known = self._block_ids
        return next((count for count, link in enumerate(links) if link[0] in known), len(links))

    def link_of(self, block_id: int) -> Link | None:
        """Return the link of a block, None when it is not published."""
        return self._links.get(block_id)

    def children(self, parent: Link, limit: int) -> list[Link]:
        """Return the links of published blocks that follow one, or another of its digest, the youngest first."""
        links = self._links
        return [links[block_id] for block_id in self.siblings.of(parent[0], limit)]

    def add(self, link: Link, block_id: int) -> None:
        """Publish a block under a digest that no block has."""
        digest, _, parent = link
        assert parent is not None, "the root is no block"
        self._block_ids[digest] = block_id
        self._links[block_id] = link
        self.siblings.add(parent[0], block_id)

    def add_run(self, links: Sequence[Link], block_ids: Sequence[int]) -> int:
        """Publish blocks up to the first under whose digest there is one, and return how many that are."""
        known, link_of, only = self._block_ids, self._links, self.siblings.only
        for count, (link, block_id) in enumerate(zip(links, block_ids, strict=True)):
            digest, _, parent = link
            if digest in known:
                return count
            known[digest] = block_id
            link_of[block_id] = link
            if only.setdefault(parent[0], block_id) != block_id:  # type: ignore[index]
                self.siblings.crowd(parent[0], block_id)  # type: ignore[index]
        return len(links)

    def remove(self, block_ids: Iterable[int]) -> None:
        """Take published blocks out of the index."""
        known, pop, remove = self._block_ids, self._links.pop, self.siblings.remove
        gone = []
        for block_id in block_ids:
            digest, _, parent = pop(block_id)
            del known[digest]
            remove(parent[0], block_id)  # type: ignore[index]
            gone.append(digest)
        self.departed.add(gone)

    def move(self, src_id: int, dst_id: int) -> None:
        """Publish another block in place of one, if that is published at all."""
        link = self._links.pop(src_id, None)
        if link is not None:
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
        get, found = self._block_ids.get, []
        for link in chain.links(num_blocks)[:num_blocks]:
            block_id = get(link[0])
            if block_id is None:
                break
            found.append(block_id)
        return found[: chain.recognise_run([self._links[block_id] for block_id in found])]

    def holds(self, chain: TokenChain, block_idx: int) -> bool:
        """Say whether a chain's block is published, whatever is before it; links are compared (M4)."""
        entry = self.get(chain.links(block_idx + 1)[block_idx][0])
        return entry is not None and chain.recognises(block_idx, entry[1])

    def block_ids(self, chain: TokenChain, start: int, end: int) -> list[int]:
        """Return the blocks that hold a chain's blocks `[start, end)`, all known to be published."""
        block_ids = self._block_ids
        return [block_ids[link[0]] for link in chain.links(end)[start:end]]


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
        holds, chain = self._index.holds, self._chain
        return next((idx for idx in range(end - 1, start - 1, -1) if not holds(chain, idx)), -1)

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published."""
        if self._leading is not None and end <= len(self._leading):
            return tuple(self._leading[start:end])
        return tuple(self._index.block_ids(self._chain, start, end))
