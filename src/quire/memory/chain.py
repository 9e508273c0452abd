"""A block's identity: a chained, keyed digest of everything that its KV depends on, and the tokens to prove it.

```
 namespace <--root-- [block 0] <--link 0-- [block 1] <--link 1-- [block 2] ...
```

Each digest covers the parent's digest and the block's content: its tokens, and the media that some of them stand for
(`quire.memory.media`). So equal digests mean equal prefixes, namespaces included, unless the hash collides. A *link*
therefore keeps the content as well, and its parent's link: two links are the same only if all content up to the
namespace is. Equal links are made one object when they meet, so that comparing them mostly ends at the first step.
Links outlive blocks: a block is proved by its link even when the blocks before it are gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import is_, itemgetter
from struct import unpack
from typing import NamedTuple

from quire.memory.media import MediaSpan

TOKEN_BYTES = 4
DIGEST_BYTES = 16

# (digest, content, parent). The content is tokens as bytes, behind those of a whole block its media's entries; the
# root's is the namespace, and it has no parent. A plain tuple: a long prompt makes thousands, and the garbage collector
# soon stops to look at plain tuples of bytes.
Link = tuple[bytes, bytes, "Link | None"]


class Namespace(NamedTuple):
    """What, besides the tokens, KV depends on or must be kept apart by.

    Args:
        model: the weights' name.
        adapter: an adapter's name, or None.
        cache_salt: a secret of the client's own; sequences with different salts never share a block.
        tenant: whose sequences these are, as the operator has it; those of different tenants never share a block.
    """

    model: str = ""
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None

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
    """The tokens of one sequence and the identities of its full blocks, each computed once.

    To look for blocks takes digests and tokens. Links are made when a block is published or recognised; each then has
    the one before it, own or adopted, as its parent.

    Args:
        tokens: the sequence's tokens. The chain keeps the reference: the owner appends to the list, and after
            `truncate` shortens it; it never changes a token in place.
        namespace: where the sequence's blocks may be shared.
        block_size: tokens of a block.
        key: a secret of at most 64 bytes, so that nobody outside can construct a collision.
        media: which tokens stand for media; behind the present tokens too.

    Raises:
        ValueError: a span before the first token, or without any.
    """

    __slots__ = ("_block_size", "_contents", "_digests", "_links", "media", "root", "tokens")

    def __init__(
        self,
        tokens: list[int],
        namespace: Namespace,
        block_size: int,
        key: bytes,
        media: Iterable[MediaSpan] = (),
    ) -> None:
        self.tokens = tokens
        self.media = tuple(sorted(media))
        for span in self.media:
            if span.start < 0 or span.num_tokens < 1:
                raise ValueError(f"media cannot stand at {span.num_tokens} tokens from {span.start} on")
        content = namespace.serialise()
        self.root: Link = (blake2b(content, digest_size=DIGEST_BYTES, key=key).digest(), content, None)
        self._block_size = block_size
        self._digests: list[bytes] = []
        self._contents: list[bytes] = []
        self._links: list[Link] = []

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: full blocks wanted, at most `len(tokens) // block_size`.
        """
        digests = self._digests
        known = len(digests)
        if known < num_blocks:
            size = self._block_size
            tokens = array("I", self.tokens[known * size : num_blocks * size])
            contents: Sequence[bytes] = (tokens.tobytes(),)
            if num_blocks - known > 1:
                contents = unpack(f"{TOKEN_BYTES * size}s" * (num_blocks - known), tokens)
            if self.media:
                contents = self._with_media(contents, known)
            self._contents += contents
            digests += block_digests(digests[-1] if known else self.root[0], contents)
        return digests

    def links(self, num_blocks: int) -> list[Link]:
        """Return the links of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: see `digests`.
        """
        links = self._links
        known = len(links)
        if known < num_blocks:
            digests, contents = self.digests(num_blocks), self._contents
            parent = links[-1] if known else self.root
            for block_idx in range(known, num_blocks):
                parent = (digests[block_idx], contents[block_idx], parent)
                links.append(parent)
        return links

    def link(self, block_idx: int) -> Link:
        """Return the link of a full block; that of the next one without the lists that a run of blocks takes."""
        links, size = self._links, self._block_size
        if not block_idx == len(links) == len(self._digests) or self.media:
            return self.links(block_idx + 1)[block_idx]
        parent = links[-1] if links else self.root
        content = array("I", self.tokens[block_idx * size : (block_idx + 1) * size]).tobytes()
        digests = block_digests(parent[0], (content,))
        link = (digests[0], content, parent)
        self._digests += digests
        self._contents.append(content)
        links.append(link)
        return link

    def recognises(self, block_idx: int, link: Link) -> bool:
        """Say whether a link stands for exactly this chain's tokens up to the end of a block.

        If so, the chain adopts it in place of its own equal one: whoever compares next is done sooner.

        Args:
            block_idx: a block whose own digest is known.
            link: found under the same digest.
        """
        links, contents = self._links, self._contents
        idx, theirs, adopted = block_idx, link, []
        while idx >= 0 and (idx >= len(links) or links[idx] is not theirs):
            parent = theirs[2]
            if theirs[1] != contents[idx] or parent is None:
                return False
            adopted.append(theirs)
            idx, theirs = idx - 1, parent
        if idx < 0:
            if theirs[1] != self.root[1] or theirs[2] is not None:
                return False
            self.root = theirs
        if adopted:
            # The own links behind would rest on others than these.
            links[idx + 1 :] = reversed(adopted)
        return True

    def recognise_run(self, run: Sequence[Link]) -> int:
        """Return how many of the first links stand for exactly this chain's tokens, and adopt those.

        Args:
            run: links found under the digests of the first blocks.
        """
        if len(self._links) >= len(run) and all(map(is_, run, self._links)):
            return len(run)
        if self._is_own(run):
            self.root = run[0][2] or self.root
            self._links[:] = run
            return len(run)
        return next((idx for idx, link in enumerate(run) if not self.recognises(idx, link)), len(run))

    def _is_own(self, run: Sequence[Link]) -> bool:
        """Say whether each link, of at least one, has the one before it as its parent, and all stand for the tokens."""
        root = run[0][2]
        return (
            root == self.root
            and list(map(itemgetter(1), run)) == self._contents[: len(run)]
            and all(map(is_, map(itemgetter(2), run), [root, *run[:-1]]))
        )

    def digest_before(self, block_idx: int) -> bytes:
        """Return the digest before a block: the root's, or that of a full block."""
        return self.digests(block_idx)[block_idx - 1] if block_idx else self.root[0]

    def content(self, block_idx: int) -> bytes:
        """Return what the link of a full block holds."""
        self.digests(block_idx + 1)
        return self._contents[block_idx]

    def part(self, start: int, end: int) -> bytes:
        """Return the tokens `[start, end)`, of one block and from its beginning on, as links hold them.

        With media among them, it is all that the block's link holds, or nothing where the block is not full.
        """
        if self.has_media(start, end):
            return self.content(start // self._block_size) if end - start == self._block_size else b""
        return array("I", self.tokens[start:end]).tobytes()

    def has_media(self, start: int, end: int) -> bool:
        """Say whether any of the tokens `[start, end)` stands for media."""
        return bool(self.media) and any(span.start < end and start < span.end for span in self.media)

    def tail_link(self, num_tokens: int) -> Link:
        """Return the link of a last block that is filled up to `num_tokens` tokens only, none of them media."""
        block_idx = num_tokens // self._block_size
        parent = self.links(block_idx)[block_idx - 1] if block_idx else self.root
        content = self.part(block_idx * self._block_size, num_tokens)
        return (block_digest(parent[0], content), content, parent)

    def recognises_parent(self, block_idx: int, link: Link) -> bool:
        """Say whether a published link comes after exactly this chain's first `block_idx` blocks."""
        parent = link[2]
        if parent is None:
            return False
        if block_idx:
            self.digests(block_idx)
            return self.recognises(block_idx - 1, parent)
        return parent[1] == self.root[1] and parent[2] is None

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks that are not full at `num_tokens` tokens; the owner then shortens `tokens`.

        Media belong to their places, and stay: whatever comes there again stands for them.
        """
        num_blocks = num_tokens // self._block_size
        for known in (self._digests, self._contents, self._links):
            del known[num_blocks:]

    def fork(self, tokens: list[int]) -> TokenChain:
        """Return a chain over `tokens`, a copy of this chain's tokens, with its media and what is known so far."""
        child = TokenChain.__new__(TokenChain)
        child.tokens = tokens
        child.media = self.media
        child.root = self.root
        child._block_size = self._block_size
        child._digests = self._digests.copy()
        child._contents = self._contents.copy()
        child._links = self._links.copy()
        return child

    def _with_media(self, contents: Sequence[bytes], first: int) -> Sequence[bytes]:
        """Return what blocks hold, from block `first` on: their tokens, as given, and the entries of their media."""
        size, whole = self._block_size, list(contents)
        for span in self.media:
            last = min(-(-span.end // size), first + len(whole))
            for idx in range(max(span.start // size, first), last):
                whole[idx - first] += span.entry(idx * size, (idx + 1) * size)
        return whole


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
    return block_digests(parent, (content,))[0]


def block_digests(parent: bytes, contents: Sequence[bytes]) -> list[bytes]:
    """Return the digests of the blocks with these tokens, one after the other, behind the one with a digest."""
    if len(contents) == 1:
        return [blake2b(parent + contents[0], digest_size=DIGEST_BYTES).digest()]
    # Of several, a copy of a hasher costs less than a new one.
    new = blake2b(digest_size=DIGEST_BYTES).copy
    digests = []
    for content in contents:
        hasher = new()
        hasher.update(parent + content)
        parent = hasher.digest()
        digests.append(parent)
    return digests
