"""A block's identity: a chained, keyed digest of everything that its KV depends on, and the tokens to prove it.

```
 namespace <--root-- [block 0] <--link 0-- [block 1] <--link 1-- [block 2] ...
```

Each digest covers the parent's digest and the block's tokens, so equal digests mean equal prefixes, namespaces
included, unless the hash collides. A *link* therefore keeps the tokens as well, and its parent's link: two links are
the same only if all tokens up to the namespace are. Equal links are made one object when they meet, so that
comparing them mostly ends at the first step. Links outlive blocks: a block is proved by its link even when the blocks
before it are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack, unpack
from typing import NamedTuple

TOKEN_BYTES = 4
DIGEST_BYTES = 16

# (digest, tokens as bytes, parent). The root's content is the namespace, and it has no parent. A plain tuple: a long
# prompt makes thousands, and the garbage collector soon stops to look at plain tuples of bytes.
Link = tuple[bytes, bytes, "Link | None"]


class Namespace(NamedTuple):
    """What, besides the tokens, KV depends on or must be kept apart by.

    Args:
        model: the weights' name.
        adapter: an adapter's name, or None.
        cache_salt: a tenant's secret; sequences with different salts never share a block.
    """

    model: str = ""
    adapter: str | None = None
    cache_salt: str | None = None

    def serialise(self) -> bytes:
        """Return a typed, length-prefixed encoding: no two namespaces encode alike."""
        parts = bytearray()
        for value in self:
            if value is None:
                parts += b"n"
            else:
                data = value.encode("utf-8", "surrogatepass")
                parts += b"s" + len(data).to_bytes(8, "little") + data
        return bytes(parts)


class TokenChain:
    """The tokens of one sequence and the links of its full blocks, each digest computed once.

    Args:
        tokens: the sequence's tokens. The chain keeps the reference: the owner appends to the list, and after
            `truncate` shortens it; it never changes a token in place.
        namespace: where the sequence's blocks may be shared.
        block_size: tokens of a block.
        key: a secret of at most 64 bytes, so that nobody outside can construct a collision.
    """

    __slots__ = ("_block_size", "_links", "root", "tokens")

    def __init__(self, tokens: list[int], namespace: Namespace, block_size: int, key: bytes) -> None:
        self.tokens = tokens
        content = namespace.serialise()
        self.root: Link = (blake2b(content, digest_size=DIGEST_BYTES, key=key).digest(), content, None)
        self._block_size = block_size
        self._links: list[Link] = []

    def links(self, num_blocks: int) -> list[Link]:
        """Return the links of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: full blocks wanted, at most `len(tokens) // block_size`.
        """
        links = self._links
        known = len(links)
        if known < num_blocks:
            size = self._block_size
            tokens = self.tokens[known * size : num_blocks * size]
            contents = unpack(f"{TOKEN_BYTES * size}s" * (num_blocks - known), pack(f"={len(tokens)}I", *tokens))
            parent = links[-1] if known else self.root
            for content in contents:
                parent = (block_digest(parent[0], content), content, parent)
                links.append(parent)
        return links

    def recognises(self, block_idx: int, link: Link) -> bool:
        """Say whether a link stands for exactly this chain's tokens up to the end of a block.

        If so, the chain adopts it in place of its own equal one: whoever compares next is done sooner.

        Args:
            block_idx: a block whose own link is known.
            link: found under the same digest.
        """
        links = self._links
        idx, theirs = block_idx, link
        while idx >= 0 and links[idx] is not theirs:
            parent = theirs[2]
            if theirs[1] != links[idx][1] or parent is None:
                return False
            idx, theirs = idx - 1, parent
        if idx < 0:
            if theirs[1] != self.root[1] or theirs[2] is not None:
                return False
            self.root = theirs
        theirs = link
        for adopted in range(block_idx, idx, -1):
            links[adopted] = theirs
            assert theirs[2] is not None
            theirs = theirs[2]
        return True

    def recognise_run(self, run: Sequence[Link]) -> int:
        """Return how many of the first links stand for exactly this chain's tokens, and adopt those.

        Args:
            run: links found under the digests of the first blocks.
        """
        links, count, parent = self._links, 0, self.root
        for own, link in zip(links, run, strict=False):
            if link is not own:
                if link[2] is parent and link[1] == own[1]:
                    links[count] = link
                elif not self.recognises(count, link):
                    break
            parent = link
            count += 1
        return count

    def canonical_links(self, start: int, end: int) -> list[Link]:
        """Return the links of `[start, end)` to publish: each has the one before it, adopted or own, as its parent."""
        links = self._links
        parent = links[start - 1] if start else self.root
        for idx in range(start, end):
            link = links[idx]
            if link[2] is not parent:
                link = links[idx] = (link[0], link[1], parent)
            parent = link
        return links[start:end]

    def parent_of(self, block_idx: int) -> Link:
        """Return the link before a block: the root, or that of a full block."""
        return self.links(block_idx)[block_idx - 1] if block_idx else self.root

    def content(self, start: int, end: int) -> bytes:
        """Return the tokens `[start, end)` as links hold them."""
        tokens = self.tokens[start:end]
        return pack(f"={len(tokens)}I", *tokens)

    def tail_link(self, num_tokens: int) -> Link:
        """Return the link of a last block that is filled up to `num_tokens` tokens only."""
        block_idx = num_tokens // self._block_size
        parent = self.parent_of(block_idx)
        content = self.content(block_idx * self._block_size, num_tokens)
        return (block_digest(parent[0], content), content, parent)

    def recognises_parent(self, block_idx: int, link: Link) -> bool:
        """Say whether a published link comes after exactly this chain's first `block_idx` blocks."""
        parent = link[2]
        if parent is None or parent is self.parent_of(block_idx):
            return parent is not None
        if block_idx:
            return self.recognises(block_idx - 1, parent)
        return parent[1] == self.root[1] and parent[2] is None

    def truncate(self, num_tokens: int) -> None:
        """Forget the links of blocks that are not full at `num_tokens` tokens; the owner then shortens `tokens`."""
        del self._links[num_tokens // self._block_size :]

    def fork(self, tokens: list[int]) -> TokenChain:
        """Return a chain over `tokens`, a copy of this chain's tokens, with the links known so far."""
        child = TokenChain.__new__(TokenChain)
        child.tokens = tokens
        child.root = self.root
        child._block_size = self._block_size
        child._links = self._links.copy()
        return child


def is_same_link(link: Link, other: Link, proven: dict[int, Link]) -> bool:
    """Say whether two links stand for the same tokens, up to the namespace.

    Args:
        link, other: the links.
        proven: by the id of a link, one that it was found to be the same as; the walk ends there. Grows.
    """
    one, two = link, other
    while one is not two and proven.get(id(one)) is not two:
        if one[1] != two[1]:
            return False
        if one[2] is None or two[2] is None:
            if one[2] is not two[2]:
                return False
            break
        one, two = one[2], two[2]
    proven[id(link)] = other
    return True


def num_common(one: bytes, other: bytes) -> int:
    """Return how many leading tokens two links' contents have in common."""
    size = min(len(one), len(other))
    # The lowest bit that differs lies in the first token that does.
    parting = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    num_bytes = ((parting & -parting).bit_length() - 1) // 8 if parting else size
    return num_bytes // TOKEN_BYTES


def block_digest(parent: bytes, content: bytes) -> bytes:
    """Return the digest of the block with these tokens after the one with this digest."""
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
