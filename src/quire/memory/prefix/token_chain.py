"""What a sequence's KV depends on: its namespace, its tokens and the media that some of them stand for, block by block.

```
 namespace <--root-- [block 0] <--digest 0-- [block 1] <--digest 1-- [block 2] ...
```

Whether blocks are the same is decided by comparing all that: see `quire.memory.prefix.radix_tree`. A *digest* is what a
block is called where its contents are not at hand, on disk and in logs, and what the tree's branches are looked up by.
It is keyed, and covers the block's content and the digest before it. So equal digests mean equal prefixes, namespaces
included, unless the hash collides; whoever finds something by its digest compares contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

from quire.memory.prefix.prompt_embeddings import MediaSpan

TOKEN_BYTES = 4
DIGEST_BYTES = 16


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


class Root(NamedTuple):
    """What the first blocks of a namespace come after.

    Args:
        digest: keyed, so that nobody outside can construct a collision.
        content: the namespace.
    """

    digest: bytes
    content: bytes


@lru_cache(maxsize=1024)
def root_of(namespace: Namespace, key: bytes) -> Root:
    """Return the root of a namespace.

    Args:
        namespace: where blocks may be shared.
        key: a secret of at most 64 bytes.

    Raises:
        ValueError: the key is longer.
    """
    content = namespace.serialise()
    return Root(blake2b(content, digest_size=DIGEST_BYTES, key=key).digest(), content)


class Cursor(Protocol):
    """A position in a prefix tree: `quire.memory.prefix.radix_tree.PrefixCursor`, of which a chain needs one method."""

    def copy(self) -> Cursor:
        """Return an independent copy."""
        ...


class TokenChain:
    """The tokens of one sequence, and the contents and digests of its full blocks, each computed once, when asked for.

    Args:
        tokens: the sequence's tokens. The chain keeps the reference: the owner appends to the list, and after
            `truncate` shortens it; it never changes a token in place.
        root: of the namespace in which the sequence's blocks may be shared.
        block_size: tokens of a block.
        media: which tokens stand for media; behind the present tokens too.

    Attributes:
        data: the tokens of the first blocks, those that were asked for, as bytes.
        entries: by block, what it keeps of media behind its tokens.
        cursor: positions of the blocks in a prefix tree, as far as they were matched; only the tree reads and sets it.

    Raises:
        ValueError: a span before the first token, or without any.
    """

    __slots__ = ("_block_size", "_digests", "cursor", "data", "entries", "media", "root", "tokens")

    def __init__(self, tokens: list[int], root: Root, block_size: int, media: Iterable[MediaSpan] = ()) -> None:
        self.tokens = tokens
        self.media = tuple(sorted(media))
        for span in self.media:
            if span.start < 0 or span.num_tokens < 1:
                raise ValueError(f"media cannot stand at {span.num_tokens} tokens from {span.start} on")
        self.root = root
        self.data = bytearray()
        self.entries: dict[int, bytes] = {}
        self.cursor: Cursor | None = None
        self._block_size = block_size
        self._digests: list[bytes] = []

    def know(self, num_blocks: int) -> None:
        """See that `data` and `entries` are those of the first blocks.

        Args:
            num_blocks: full blocks wanted, at most `len(tokens) // block_size`.
        """
        size = self._block_size
        known = len(self.data) // (size * TOKEN_BYTES)
        if known < num_blocks:
            tokens = self.tokens[known * size :] if known else self.tokens
            self.data += memoryview(array("I", tokens))[: (num_blocks - known) * size]
            if self.media:
                self.entries |= self._entries_of(known, num_blocks)

    def content(self, block_idx: int) -> bytes:
        """Return what a full block holds: its tokens, and behind them its media's entries."""
        self.know(block_idx + 1)
        size = self._block_size * TOKEN_BYTES
        tokens = bytes(self.data[block_idx * size : (block_idx + 1) * size])
        return tokens + self.entries.get(block_idx, b"") if self.entries else tokens

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: see `know`.
        """
        digests = self._digests
        known = len(digests)
        if known < num_blocks:
            self.know(num_blocks)
            parent = digests[-1] if known else self.root.digest
            digests += digests_of(parent, self.data, self.entries, self._block_size, known, num_blocks)
        return digests

    def digest_before(self, block_idx: int) -> bytes:
        """Return the digest before a block: the root's, or that of a full block."""
        return self.digests(block_idx)[block_idx - 1] if block_idx else self.root.digest

    def part(self, start: int, end: int) -> bytes:
        """Return the tokens `[start, end)`, of one block and from its beginning on, as `content` holds them.

        With media among them, it is all that the block holds, or nothing where the block is not full.
        """
        if self.has_media(start, end):
            return self.content(start // self._block_size) if end - start == self._block_size else b""
        return array("I", self.tokens[start:end]).tobytes()

    def has_media(self, start: int, end: int) -> bool:
        """Say whether any of the tokens `[start, end)` stands for media."""
        return bool(self.media) and any(span.start < end and start < span.end for span in self.media)

    def fresh(self) -> TokenChain:
        """Return a chain over the same tokens that knows nothing yet."""
        return TokenChain(self.tokens, self.root, self._block_size, self.media)

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks that are not full at `num_tokens` tokens; the owner then shortens `tokens`.

        Media belong to their places, and stay: whatever comes there again stands for them.
        """
        num_blocks, size = num_tokens // self._block_size, self._block_size * TOKEN_BYTES
        if num_blocks * size < len(self.data):
            del self.data[num_blocks * size :]
            self.entries = {idx: entry for idx, entry in self.entries.items() if idx < num_blocks}
            self.cursor = None
        del self._digests[num_blocks:]

    def fork(self, tokens: list[int]) -> TokenChain:
        """Return a chain over `tokens`, a copy of this chain's tokens, with its media and what is known so far."""
        child = TokenChain.__new__(TokenChain)
        child.tokens = tokens
        child.media = self.media
        child.root = self.root
        child.data = self.data.copy()
        child.entries = self.entries.copy()
        child.cursor = None if self.cursor is None else self.cursor.copy()
        child._block_size = self._block_size
        child._digests = self._digests.copy()
        return child

    def _entries_of(self, start: int, end: int) -> dict[int, bytes]:
        """Return what those of the blocks `[start, end)` that media touch keep of them."""
        size = self._block_size
        entries: dict[int, bytes] = {}
        for span in self.media:
            for idx in range(max(span.start // size, start), min(-(-span.end // size), end)):
                entries[idx] = entries.get(idx, b"") + span.entry(idx * size, (idx + 1) * size)
        return entries


def digests_of(
    parent: bytes, data: bytearray, entries: dict[int, bytes], block_size: int, start: int, end: int
) -> list[bytes]:
    """Return the digests of the blocks `[start, end)`, of tokens as bytes and the entries of media, behind one."""
    size = block_size * TOKEN_BYTES
    contents = [bytes(data[place : place + size]) for place in range(start * size, end * size, size)]
    if entries:
        contents = [content + entries.get(idx, b"") for idx, content in enumerate(contents, start)]
    return block_digests(parent, contents)


def num_common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Return how many leading tokens two contents have in common."""
    size = min(len(one), len(other))
    # The lowest bit that differs lies in the first token that does.
    parting = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    num_bytes = ((parting & -parting).bit_length() - 1) // 8 if parting else size
    return num_bytes // TOKEN_BYTES


def block_digest(parent: bytes, content: bytes) -> bytes:
    """Return the digest of the block with this content after the one with this digest."""
    return block_digests(parent, (content,))[0]


def block_digests(parent: bytes, contents: Sequence[bytes]) -> list[bytes]:
    """Return the digests of the blocks with these contents, one after the other, behind the one with a digest."""
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
