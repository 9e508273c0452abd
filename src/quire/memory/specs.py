"""The cache kinds of layer groups (full attention, window, chunks, state), as pure functions of token counts.

The manager calls a spec's methods and never checks its type. With `n` tokens computed, the next query has position `n`:

```
 tokens   |<-- dead -->|<-- live: [first_live_token(n), n) -->| n
 blocks   [ null ][ null ][ held ][ held ][ held ][ held ]
```

A block is dead once all its tokens are. Dead tokens are never read again.

A recurrent state covers all tokens in one block, which is always the last entry of the block table:

```
 blocks   [ null ][ null ][ null ][ null ][ null ][ state after n tokens ]
```
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Protocol

NEVER_FREED = sys.maxsize


class PublishedRun(Protocol):
    """The queries of a spec about the published blocks of one chain in one cache group."""

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are published without a gap."""

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""


class KVCacheSpec(Protocol):
    """The methods of every kind of cache."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: all layers of the group, K and V."""

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table that holds `num_tokens` tokens, null entries included."""

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token that is still read when `num_tokens` tokens are computed; it never decreases."""

    def freed_after(self, block_idx: int) -> int:
        """Return the number of computed tokens from which on a block is dead; `NEVER_FREED` if it never is."""

    @property
    def period(self) -> int:
        """Number of blocks after which the alignment of live tokens to blocks repeats."""

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum number of blocks held at once up to `num_tokens` tokens, at most `step_tokens` a step."""

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix, in blocks and at most `limit`, whose live blocks are all published."""

    @property
    def is_recurrent(self) -> bool:
        """True for a recurrent state: one block, the table's last entry, which every step overwrites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """The base of all caches that store keys and values of tokens.

    Args:
        block_size: tokens of a block.
        num_layers: layers that share the block table.
        num_kv_heads: KV heads of a layer (the real ones of a grouped-query model).
        head_dim: number of elements of a head.
        element_bytes: bytes of one element.
        scale_bytes: bytes of the quantization scale of a token's K, and of its V, in one head; 0 without scales.
    """

    block_size: int
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    element_bytes: int = 2
    scale_bytes: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: tokens x layers x (K and V) x KV heads x (head dim x element bytes, and a scale)."""
        head_bytes = self.head_dim * self.element_bytes + self.scale_bytes
        return self.block_size * self.num_layers * 2 * self.num_kv_heads * head_bytes

    @property
    def is_recurrent(self) -> bool:
        """False: tokens stay in their blocks."""
        return False

    @property
    def period(self) -> int:
        """1: live tokens are aligned to blocks in the same way after each block."""
        return 1

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table that holds `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(TokenSpec):
    """Every token stays live for as long as its sequence."""

    def first_live_token(self, num_tokens: int) -> int:  # noqa: ARG002
        """Return 0: every token is read."""
        return 0

    def freed_after(self, block_idx: int) -> int:  # noqa: ARG002
        """Return `NEVER_FREED`."""
        return NEVER_FREED

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:  # noqa: ARG002
        """Return the blocks of all tokens."""
        return -(-num_tokens // self.block_size)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the length of the leading run."""
        return published.leading(limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(TokenSpec):
    """A query at position `p` reads the tokens `(p - window, p]`.

    Args:
        window: tokens that a query reads, its own included.
    """

    window: int

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token of the next query's window."""
        return max(0, num_tokens - self.window + 1)

    def freed_after(self, block_idx: int) -> int:
        """Return the number of tokens at which the next query's window begins after the block."""
        return (block_idx + 1) * self.block_size + self.window - 1

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum number of blocks that `window - 1` tokens and a step touch, in any alignment to blocks.

        A run of `L` tokens touches at most `ceil((L - 1) / block_size) + 1` blocks; the maximum is reached as soon as
        that many blocks exist.
        """
        run = self.window - 1 + step_tokens
        return min(self.num_blocks(num_tokens), -(-(run - 1) // self.block_size) + 1)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix whose last window is published."""
        return _longest_live_hit(self, published, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocal(TokenSpec):
    """A query reads the tokens of its own chunk, up to itself; chunks start at multiples of `chunk`.

    Args:
        chunk: tokens of a chunk.
    """

    chunk: int

    @property
    def period(self) -> int:
        """Number of blocks from one chunk that starts at a block boundary to the next such chunk."""
        return math.lcm(self.chunk, self.block_size) // self.block_size

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token of the next query's chunk."""
        return num_tokens // self.chunk * self.chunk

    def freed_after(self, block_idx: int) -> int:
        """Return the first start of a chunk at or after the end of the block."""
        return -(-(block_idx + 1) * self.block_size // self.chunk) * self.chunk

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum number of blocks that a chunk and a whole step from its last token on touch.

        Only a few chunks are checked: the alignment of chunks to blocks repeats, and the first chunk that `num_tokens`
        cuts short is the longest of those.
        """
        size = self.block_size
        run = self.chunk - 1 + step_tokens
        first_cut = max(0, -(-(num_tokens - run) // self.chunk))
        num_different = size // math.gcd(self.chunk, size)
        chunks: list[int] = [*range(min(first_cut, num_different)), min(first_cut, (num_tokens - 1) // self.chunk)]
        return max(self.num_blocks(min(num_tokens, i * self.chunk + run)) - i * self.chunk // size for i in chunks)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix whose last chunk, which may be incomplete, is published."""
        return _longest_live_hit(self, published, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A query reads the state after all tokens before it, and nothing else; one block is one state.

    Args:
        block_size: number of tokens between two lengths at which a state may be published; the same in all groups.
        num_layers: layers whose states lie in one block.
        layer_bytes: bytes of one layer's state.
    """

    block_size: int
    num_layers: int = 1
    layer_bytes: int = 1

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a sequence's state, all layers."""
        return self.num_layers * self.layer_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table after `num_tokens` tokens: all entries but the last are null."""
        return -(-num_tokens // self.block_size)

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token of the last block, whose block table entry is the state."""
        return max(0, num_tokens - 1) // self.block_size * self.block_size

    @property
    def period(self) -> int:
        """Return 1: there is always one block."""
        return 1

    def freed_after(self, block_idx: int) -> int:  # noqa: ARG002
        """Return `NEVER_FREED`: a state is never out of the window, its block moves along the table."""
        return NEVER_FREED

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:  # noqa: ARG002
        """Return 1, or 0 without tokens: a snapshot's second block is optional, so it does not count."""
        return min(num_tokens, 1)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix at whose end a state is published."""
        return _longest_live_hit(self, published, limit)

    @property
    def is_recurrent(self) -> bool:
        """Return True."""
        return True


def _longest_live_hit(spec: KVCacheSpec, published: PublishedRun, limit: int) -> int:
    """Return the longest prefix whose live blocks are published: each gap found is the next length to try."""
    size = spec.block_size
    end = limit
    while end:
        gap = published.last_gap(spec.first_live_token(end * size) // size, end)
        if gap < 0:
            break
        end = gap
    return end
