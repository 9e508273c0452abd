"""A block's identity: a chained, keyed digest of everything that its KV depends on.

```
 namespace --root--> [block 0] --digest 0--> [block 1] --digest 1--> [block 2] ...
```

Each digest covers the parent's digest and the block's tokens, so equal digests mean equal prefixes, namespaces
included, unless the hash collides; the index compares tokens too, so that a collision is a miss.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16


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
    """The tokens of one sequence and the digests of its full blocks, each computed once.

    Args:
        tokens: the sequence's tokens. The chain keeps the reference: the owner appends to the list, and after
            `truncate` shortens it; it never changes a token in place.
        namespace: where the sequence's blocks may be shared.
        block_size: tokens of a block.
        key: a secret of at most 64 bytes, so that nobody outside can construct a collision.
    """

    __slots__ = ("_block_size", "_contents", "_digests", "root", "tokens")

    def __init__(self, tokens: list[int], namespace: Namespace, block_size: int, key: bytes) -> None:
        self.tokens = tokens
        self.root = blake2b(namespace.serialise(), digest_size=DIGEST_BYTES, key=key).digest()
        self._block_size = block_size
        self._digests: list[bytes] = []
        self._contents: list[bytes] = []

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return the digests of the first blocks, at least `num_blocks` of them; do not change the list.

        Args:
            num_blocks: full blocks wanted, at most `len(tokens) // block_size`.
        """
        known = len(self._digests)
        if known < num_blocks:
            size = self._block_size
            data = array("I", self.tokens[known * size : num_blocks * size]).tobytes()
            stride = len(data) // (num_blocks - known)
            parent = self._digests[-1] if known else self.root
            for start in range(0, len(data), stride):
                content = data[start : start + stride]
                parent = block_digest(parent, content)
                self._digests.append(parent)
                self._contents.append(content)
        return self._digests

    def contents(self, num_blocks: int) -> list[bytes]:
        """Return the tokens of the first blocks as bytes, at least `num_blocks` of them; do not change the list."""
        self.digests(num_blocks)
        return self._contents

    def truncate(self, num_tokens: int) -> None:
        """Forget the digests of blocks that are not full at `num_tokens` tokens; the owner then shortens `tokens`."""
        num_blocks = num_tokens // self._block_size
        del self._digests[num_blocks:]
        del self._contents[num_blocks:]

    def fork(self, tokens: list[int]) -> TokenChain:
        """Return a chain over `tokens`, a copy of this chain's tokens, with the digests known so far."""
        child = TokenChain.__new__(TokenChain)
        child.tokens = tokens
        child.root = self.root
        child._block_size = self._block_size
        child._digests = self._digests.copy()
        child._contents = self._contents.copy()
        return child


def block_digest(parent: bytes, content: bytes) -> bytes:
    """Return the identity of the block with these tokens after this parent."""
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
