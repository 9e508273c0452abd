"""The identity of a sequence's blocks: namespace, tokens, and the media that placeholder tokens stand for.

```
 namespace <--root-- [block 0] <--digest 0-- [block 1] <--digest 1-- [block 2] ...
```

Two blocks are equal if all of these are equal, from the first block on; `quire.memory.prefix.radix_tree` compares them.
A *digest* identifies a block if its content is not available, on disk and in logs. It is a keyed hash of the block's
content and the digest before it. So equal digests mean equal prefixes, namespaces included, unless the hash collides; a
look-up by digest also compares contents.
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
# Copying a hasher costs less than making one.
_new_hasher = blake2b(digest_size=DIGEST_BYTES).copy


class Namespace(NamedTuple):
    """The scope within which blocks with equal tokens are shared.

    Args:
        model: name of the weights.
        adapter: name of an adapter, or None.
        cache_salt: secret of the client; sequences with different salts never share a block.
        tenant: tenant of the operator; sequences of different tenants never share a block.
    """

    model: str = ""
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None

    def serialise(self) -> bytes:
        """Return a typed, length-prefixed encoding: different namespaces have different encodings."""
        parts = bytearray()
        for value in self:
            if value is None:
                parts += b"n"
            else:
                data = value.encode("utf-8", "surrogatepass")
                parts += b"s" + len(data).to_bytes(8, "little") + data
        return bytes(parts)

    @classmethod
    def deserialise(cls, content: bytes) -> Namespace:
        """Return the namespace of an encoding; the inverse of `serialise`."""
        values: list[str | None] = []
        at = 0
        while at < len(content):
            if content[at : at + 1] == b"n":
                values.append(None)
                at += 1
            else:
                start = at + 9
                at = start + int.from_bytes(content[at + 1 : start], "little")
                values.append(content[start:at].decode("utf-8", "surrogatepass"))
        model, *optional_values = values
        assert model is not None, "a namespace has a model"
        return cls(model, *optional_values)


class Root(NamedTuple):
    """The parent of the first blocks of a namespace.

    Args:
        digest: keyed digest, so that a client cannot construct a collision.
        content: the encoded namespace.
    """

    digest: bytes
    content: bytes


@lru_cache(maxsize=1024)
def root_of(namespace: Namespace, key: bytes) -> Root:
    """Return the root of a namespace."""
    content = namespace.serialise()
    return Root(blake2b(content, digest_size=DIGEST_BYTES, key=key).digest(), content)


class Cursor(Protocol):
    """A position in a prefix tree: the method of `quire.memory.prefix.radix_tree.PrefixCursor` that a chain needs."""

    def copy(self) -> Cursor:
        """Return an independent copy."""


class TokenChain:
    """The tokens of one sequence, and the contents and digests of its full blocks, each computed once, on demand.

    Args:
        tokens: tokens of the sequence. The chain keeps the reference: the owner appends to the list, and shortens it
            after `truncate`; it never changes a token in place.
        root: root of the namespace of the sequence.
        block_size: number of tokens of a block.
        media: spans of placeholder tokens of media, also beyond the present tokens.

    Attributes:
        data: token ids of the leading blocks that are encoded so far, 4 bytes each.
        entries: block index -> media entries of the block.
        cursor: positions in a prefix tree of the blocks that are matched so far; only the tree reads and sets it.

    Raises:
        ValueError: a span begins before the first token, or is empty.
    """

    __slots__ = ("_block_size", "_digests", "cursor", "data", "entries", "media", "root", "tokens")

    def __init__(self, tokens: list[int], root: Root, block_size: int, media: Iterable[MediaSpan] = ()) -> None:
        self.tokens = tokens
        self.media = tuple(sorted(media))
        for span in self.media:
            if span.start < 0 or span.num_tokens < 1:
                raise ValueError(
                    f"a media span needs start >= 0 and num_tokens >= 1, got {span.start}, {span.num_tokens}"
                )
        self.root = root
        self.data = bytearray()
        self.entries: dict[int, bytes] = {}
        self.cursor: Cursor | None = None
        self._block_size = block_size
        self._digests: list[bytes] = []

    def encode(self, num_blocks: int) -> None:
        """Extend `data` and `entries` to the first `num_blocks` blocks.

        Args:
            num_blocks: number of full blocks, at most `len(tokens) // block_size`.
        """
        size = self._block_size
        num_encoded = len(self.data) // (size * TOKEN_BYTES)
        if num_encoded < num_blocks:
            if num_encoded:
                self.data += array("I", self.tokens[num_encoded * size : num_blocks * size])
            else:  # usually a whole prompt: the list is not sliced
                self.data += memoryview(array("I", self.tokens))[: num_blocks * size]
            if self.media:
                self.entries |= self._entries_of(num_encoded, num_blocks)

    def content(self, block_idx: int) -> bytes:
        """Return the content of a full block: its tokens, then its media entries."""
        self.encode(block_idx + 1)
        size = self._block_size * TOKEN_BYTES
        tokens = bytes(self.data[block_idx * size : (block_idx + 1) * size])
        return tokens + self.entries.get(block_idx, b"") if self.entries else tokens

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: see `encode`.
        """
        digests = self._digests
        num_known = len(digests)
        if num_known < num_blocks:
            self.encode(num_blocks)
            parent = digests[-1] if num_known else self.root.digest
            digests += digests_of(parent, self.data, self.entries, self._block_size, num_known, num_blocks)
        return digests

    def digest_before(self, block_idx: int) -> bytes:
        """Return the digest of the block before `block_idx`, or of the root."""
        return self.digests(block_idx)[block_idx - 1] if block_idx else self.root.digest

    def part(self, start: int, end: int) -> bytes:
        """Return the tokens `[start, end)` at the beginning of one block, encoded as in `content`.

        With media among them, return the content of the block, or no bytes if the range is not a whole block.
        """
        if self.has_media(start, end):
            return self.content(start // self._block_size) if end - start == self._block_size else b""
        return array("I", self.tokens[start:end]).tobytes()

    def has_media(self, start: int, end: int) -> bool:
        """Return whether any of the tokens `[start, end)` stands for media."""
        return bool(self.media) and any(span.start < end and start < span.end for span in self.media)

    def fresh(self) -> TokenChain:
        """Return a chain over the same tokens with nothing encoded."""
        return TokenChain(self.tokens, self.root, self._block_size, self.media)

    def truncate(self, num_tokens: int) -> None:
        """Drop the blocks that are not full at `num_tokens` tokens; the owner then shortens `tokens`.

        Media belong to positions, and stay: tokens that are appended there again are placeholders.
        """
        num_blocks, size = num_tokens // self._block_size, self._block_size * TOKEN_BYTES
        if num_blocks * size < len(self.data):
            del self.data[num_blocks * size :]
            self.entries = {idx: entry for idx, entry in self.entries.items() if idx < num_blocks}
            self.cursor = None
        del self._digests[num_blocks:]

    def fork(self, tokens: list[int]) -> TokenChain:
        """Return a chain over `tokens`, a copy of this chain's tokens, with its media, encoded blocks and digests."""
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
        """Return the media entries of the blocks `[start, end)` that overlap media."""
        size = self._block_size
        entries: dict[int, bytes] = {}
        for span in self.media:
            for idx in range(max(span.start // size, start), min(-(-span.end // size), end)):
                entries[idx] = entries.get(idx, b"") + span.entry(idx * size, (idx + 1) * size)
        return entries


def digests_of(
    parent: bytes, data: bytearray, entries: dict[int, bytes], block_size: int, start: int, end: int
) -> list[bytes]:
    """Return the digests of the blocks `[start, end)` of encoded tokens and media, after the digest `parent`."""
    size = block_size * TOKEN_BYTES
    # Slices of bytes cost a third of slices of a bytearray, which would be copied twice.
    encoded = bytes(data[start * size : end * size])
    if end - start == 1:  # a block that has filled while decoding
        contents = [encoded]
    else:
        contents = [encoded[offset : offset + size] for offset in range(0, len(encoded), size)]
    if entries:
        contents = [content + entries.get(idx, b"") for idx, content in enumerate(contents, start)]
    return block_digests(parent, contents)


def num_common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Return the number of leading tokens that two contents have in common."""
    size = min(len(one), len(other))
    # The lowest differing bit lies in the first differing token.
    difference = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    num_bytes = ((difference & -difference).bit_length() - 1) // 8 if difference else size
    return num_bytes // TOKEN_BYTES


def block_digest(parent: bytes, content: bytes) -> bytes:
    """Return the digest of a block from the digest before it and its content."""
    return block_digests(parent, (content,))[0]


def block_digests(parent: bytes, contents: Sequence[bytes]) -> list[bytes]:
    """Return the digests of consecutive blocks from the digest before the first and their contents."""
    digests = []
    for content in contents:
        hasher = _new_hasher()
        hasher.update(parent + content)
        parent = hasher.digest()
        digests.append(parent)
    return digests
