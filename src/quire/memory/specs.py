"""What kind of cache a group of layers needs, as pure functions of token counts.

The manager asks a spec and never looks at its kind, so that sliding windows, chunked local attention and recurrent
state come in as further classes with the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class KVCacheSpec(Protocol):
    """The questions that the manager asks of every kind of cache."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: all layers of the group, K and V."""
        ...

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table that holds `num_tokens` tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Every token stays live for as long as its sequence.

    Args:
        block_size: tokens of a block.
        num_layers: layers that share the block table.
        num_kv_heads: KV heads of a layer (the real ones of a grouped-query model).
        head_dim: values of a head.
        element_bytes: bytes of one value.
    """

    block_size: int
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    element_bytes: int = 2

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: tokens x layers x (K and V) x KV heads x head dim x element bytes."""
        return self.block_size * self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table that holds `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
