"""The prefix index: from a block's identity to the block that holds it."""

from __future__ import annotations

from typing import NamedTuple


class PublishedBlock(NamedTuple):
    """A published block.

    Args:
        block_id: the block.
        parent: the identity of the block before it, or the namespace's root.
        content: its tokens as bytes.
    """

    block_id: int
    parent: bytes
    content: bytes


class PrefixIndex:
    """Maps identities to published blocks, one block each way.

    Invariants: M4.
    """

    __slots__ = ("_blocks", "_digests")

    def __init__(self) -> None:
        self._blocks: dict[bytes, PublishedBlock] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    def get(self, digest: bytes) -> PublishedBlock | None:
        """Return the block published under an identity; the caller compares parent and content."""
        return self._blocks.get(digest)

    def digest_of(self, block_id: int) -> bytes | None:
        """Return the identity of a block, None when it is not published."""
        return self._digests.get(block_id)

    def add(self, digest: bytes, block: PublishedBlock) -> None:
        """Publish a block under an identity that no block has."""
        self._blocks[digest] = block
        self._digests[block.block_id] = digest

    def remove(self, block_id: int) -> None:
        """Take a published block out of the index."""
        del self._blocks[self._digests.pop(block_id)]

    def children(self, block_id: int) -> list[int]:
        """Return the published blocks that continue a published one; looks at every block."""
        parent = self._digests[block_id]
        return [block.block_id for block in self._blocks.values() if block.parent == parent]

    def items(self) -> list[tuple[bytes, PublishedBlock]]:
        """Return all identities and their blocks, in the order of publication."""
        return list(self._blocks.items())

    def walk(self, digests: list[bytes], contents: list[bytes], root: bytes, limit: int) -> list[int]:
        """Return the blocks of the longest published prefix of a chain.

        Tokens and parents are compared, so a colliding digest ends the prefix.

        Args:
            digests: identities of the chain's blocks.
            contents: their tokens as bytes.
            root: the namespace's root.
            limit: blocks to look at, at most.
        """
        found: list[int] = []
        parent = root
        blocks = self._blocks
        for i in range(limit):
            digest = digests[i]
            block = blocks.get(digest)
            if block is None or block[2] != contents[i] or block[1] != parent:
                break
            found.append(block[0])
            parent = digest
        return found
