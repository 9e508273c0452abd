"""The prefix index: from a block's identity to the block that holds it."""

from __future__ import annotations

from quire.memory.chain import Link, TokenChain


class PrefixIndex:
    """Maps identities to published blocks, one block each way.

    Invariants: M4.
    """

    __slots__ = ("_entries", "_links")

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[int, Link]] = {}
        self._links: dict[int, Link] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._links

    def get(self, digest: bytes) -> tuple[int, Link] | None:
        """Return the block published under an identity, and its link, which the caller compares."""
        return self._entries.get(digest)

    def link_of(self, block_id: int) -> Link | None:
        """Return the link of a block, None when it is not published."""
        return self._links.get(block_id)

    def add(self, link: Link, block_id: int) -> None:
        """Publish a block under an identity that no block has."""
        self._entries[link[0]] = block_id, link
        self._links[block_id] = link

    def remove(self, block_id: int) -> None:
        """Take a published block out of the index."""
        del self._entries[self._links.pop(block_id)[0]]

    def move(self, src_id: int, dst_id: int) -> None:
        """Publish another block in place of one, if that is published at all."""
        link = self._links.pop(src_id, None)
        if link is not None:
            self.add(link, dst_id)

    def items(self) -> list[tuple[int, Link]]:
        """Return all published blocks and their links, in the order of publication."""
        return list(self._entries.values())

    def view(self, chain: TokenChain, num_blocks: int) -> ChainView:
        """Return what this index holds of a chain's first blocks."""
        return ChainView(self._entries, chain, num_blocks)


class ChainView:
    """One chain's published blocks in one index: what `quire.memory.specs.PublishedRun` asks for.

    Links are compared down to the namespace, so a colliding digest is a block that is not published (M4).

    Args:
        entries: of the index.
        chain: whose blocks.
        num_blocks: full blocks of the chain that may be asked about.
    """

    __slots__ = ("_chain", "_entries", "_leading", "_links")

    def __init__(self, entries: dict[bytes, tuple[int, Link]], chain: TokenChain, num_blocks: int) -> None:
        self._entries = entries
        self._chain = chain
        self._links = chain.links(num_blocks)
        self._leading: int | None = None

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are published without a gap; the first call has the largest."""
        if self._leading is None:
            entries, links, recognises = self._entries, self._links, self._chain.recognises
            count = 0
            while count < limit:
                own = links[count]
                entry = entries.get(own[0])
                if entry is None or (entry[1] is not own and not recognises(count, entry[1])):
                    break
                count += 1
            self._leading = count
        return min(self._leading, limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        for idx in range(end - 1, start - 1, -1):
            entry = self._entries.get(self._links[idx][0])
            if entry is None or not self._chain.recognises(idx, entry[1]):
                return idx
        return -1

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published."""
        entries = self._entries
        return tuple([entries[link[0]][0] for link in self._links[start:end]])
