"""The kinds of cache of layer groups, as pure functions of token counts.

The manager asks a spec and never looks at its kind. With `n` tokens computed, the next query stands at position `n`:

```
 tokens   |<-- dead -->|<-- live: [first_live_token(n), n) -->| n
 blocks   [ null ][ null ][ held ][ held ][ held ][ held ]
```

A block is dead once all its tokens are. Dead tokens are never read again.

A recurrent state includes all tokens in one block, which growth moves to the last entry of the table:

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
    """The questions that the manager asks of every kind of cache."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: all layers of the group, K and V."""

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table that holds `num_tokens` tokens, null entries included."""

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token that is still read when `num_tokens` tokens are computed; never falls."""

    def freed_after(self, block_idx: int) -> int:
        """Return how many tokens must be computed for a block to be dead; `NEVER_FREED` when none suffice."""

    @property
    def period(self) -> int:
        """Blocks after which the way in which live tokens lie in blocks repeats."""

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks held at once on the way to `num_tokens` tokens, `step_tokens` a step at most."""

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix, in blocks and at most `limit`, whose live blocks are all published."""

    @property
    def is_recurrent(self) -> bool:
        """True for a state: the last block is all there is, every step writes it, and growth takes it along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """The part that all caches of tokens share.

    Args:
        block_size: tokens of a block.
        num_layers: layers that share the block table.
        num_kv_heads: KV heads of a layer (the real ones of a grouped-query model).
        head_dim: values of a head.
        element_bytes: bytes of one value.
        scale_bytes: bytes of the scale of each token's keys, and of its values, of a head; 0 without one.
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
        """1: a block later, the live tokens begin one block further."""
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
        """Return the length at which the next query's window lies right of the block."""
        return (block_idx + 1) * self.block_size + self.window - 1

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the blocks that `window - 1` tokens and a step touch at most, wherever they lie.

        A run of `L` tokens touches at most `ceil((L - 1) / block_size) + 1` blocks; it does as soon as that many
        blocks exist.
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
        """Number of blocks up to the next chunk that starts with a block."""
        return math.lcm(self.chunk, self.block_size) // self.block_size

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token of the next query's chunk."""
        return num_tokens // self.chunk * self.chunk

    def freed_after(self, block_idx: int) -> int:
        """Return the first start of a chunk that lies right of the block."""
        return -(-(block_idx + 1) * self.block_size // self.chunk) * self.chunk

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the blocks that a chunk touches whose last token brings a whole step along: the most of any chunk.

        Chunks lie in blocks in the same way again and again, and of those that `num_tokens` cuts short the first is
        the longest: so a few chunks stand for all.
        """
        size = self.block_size
        run = self.chunk - 1 + step_tokens
        first_cut = max(0, -(-(num_tokens - run) // self.chunk))
        num_different = size // math.gcd(self.chunk, size)
        chunks: list[int] = [*range(min(first_cut, num_different)), min(first_cut, (num_tokens - 1) // self.chunk)]
        return max(self.num_blocks(min(num_tokens, i * self.chunk + run)) - i * self.chunk // size for i in chunks)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix whose last chunk, as far as it goes, is published."""
        return _longest_live_hit(self, published, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A query reads the state after all tokens before it, and nothing else; one block is one state.

    Args:
        block_size: tokens between two places where a state may be published, as long as other groups' blocks.
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
        """Return the length of the block table after so many tokens: all entries but the last are null."""
        return -(-num_tokens // self.block_size)

    def first_live_token(self, num_tokens: int) -> int:
        """Return the first token of the last block, in whose place of the table the state is."""
        return max(0, num_tokens - 1) // self.block_size * self.block_size

    @property
    def period(self) -> int:
        """Return 1: there is always one block."""
        return 1

    def freed_after(self, block_idx: int) -> int:  # noqa: ARG002
        """Return `NEVER_FREED`: a state does not die as tokens are computed, it moves on."""
        return NEVER_FREED

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:  # noqa: ARG002
        """Return 1 where there are tokens: where a snapshot would need a second block, memory can do without it."""
        return min(num_tokens, 1)

    def longest_hit(self, published: PublishedRun, limit: int) -> int:
        """Return the longest prefix at whose end a state is published."""
        return _longest_live_hit(self, published, limit)

    @property
    def is_recurrent(self) -> bool:
        """Return True."""
        return True


def _longest_live_hit(spec: KVCacheSpec, published: PublishedRun, limit: int) -> int:
    """Return the longest prefix whose live blocks are published: each gap found is where to try next."""
    size = spec.block_size
    end = limit
    while end:
        gap = published.last_gap(spec.first_live_token(end * size) // size, end)
        if gap < 0:
            break
        end = gap
    return end
