"""Byte layout of slabs and blocks in the range that all cache groups share: arithmetic only.

```
 bytes      | null |<----- slab 0 ----->|<----- slab 1 ----->|<----- slab 2 ----->| rest |
 group 0    [  0   ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][ 8 ][ 9 ][ 10 ][ 11 ][ 12 ]
 group 1    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ].. a view of the same bytes, cut differently ..
```

Each group sees the whole range as an array of its own blocks: block `i` is the bytes `[i * b, (i + 1) * b)`. A slab is
assigned to one group at a time, and its blocks are the blocks of the group's view that lie entirely inside it. So ids
need no table, no group is padded to another's block size, and a returned slab is usable for any block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from math import gcd
from typing import NamedTuple

# Maximum share of a slab that may be lost to alignment, before its first block and after its last.
MOST_ALIGNMENT_LOSS = 0.01


class SlabLayout(NamedTuple):
    """Slabs in a byte range, and the blocks of each group in a slab.

    Args:
        block_bytes: bytes of a block of each group.
        slab_bytes: a multiple of the largest block.
        first_byte: offset of slab 0; the null block of every group lies before it.
        num_slabs: number of slabs.
        blocks_per_slab: number of blocks of each group in a slab.
    """

    block_bytes: tuple[int, ...]
    slab_bytes: int
    first_byte: int
    num_slabs: int
    blocks_per_slab: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes from the null block to the end of the last slab."""
        return self.first_byte + self.num_slabs * self.slab_bytes

    def num_ids(self, group_idx: int) -> int:
        """Return the number of blocks of a group's view, usable or not: the ids are `[0, num_ids)`."""
        return self.num_bytes // self.block_bytes[group_idx]

    def filled(self, num_blocks: Sequence[int]) -> list[int]:
        """Return for each group the number of slabs that `num_blocks` blocks fill."""
        return [-(-count // per_slab) for count, per_slab in zip(num_blocks, self.blocks_per_slab, strict=True)]

    def num_filled(self, num_blocks: Sequence[int]) -> int:
        """Return the number of slabs that `num_blocks` blocks of each group fill together."""
        return sum(self.filled(num_blocks))

    def first_block(self, group_idx: int, slab: int) -> int:
        """Return the first block of a group inside a slab."""
        return self.first_blocks(group_idx, (slab,))[0]

    def first_blocks(self, group_idx: int, slabs: Iterable[int]) -> list[int]:
        """Return the first block of a group inside each slab."""
        block_bytes, first_byte, slab_bytes = self.block_bytes[group_idx], self.first_byte, self.slab_bytes
        if block_bytes == slab_bytes:
            first = -(-first_byte // block_bytes)
            return [first + slab for slab in slabs]
        return [-(-(first_byte + slab * slab_bytes) // block_bytes) for slab in slabs]

    def blocks_of(self, group_idx: int, slab: int) -> range:
        """Return the blocks of a group inside a slab."""
        (first,) = self.first_blocks(group_idx, (slab,))
        return range(first, first + self.blocks_per_slab[group_idx])

    def blocks_in(self, group_idx: int, slabs: Iterable[int]) -> list[int]:
        """Return the blocks of a group inside some slabs."""
        firsts, count = self.first_blocks(group_idx, slabs), self.blocks_per_slab[group_idx]
        return firsts if count == 1 else [block_id for first in firsts for block_id in range(first, first + count)]

    def slab_of(self, group_idx: int, block_id: int) -> int:
        """Return the slab that a block of a group lies in."""
        return self.slabs_of(group_idx, (block_id,))[0]

    def slabs_of(self, group_idx: int, block_ids: Iterable[int]) -> list[int]:
        """Return the slab of each of a group's blocks."""
        block_bytes, first_byte, slab_bytes = self.block_bytes[group_idx], self.first_byte, self.slab_bytes
        if block_bytes == slab_bytes:
            first = -(-first_byte // block_bytes)
            return [block_id - first for block_id in block_ids]
        return [(block_id * block_bytes - first_byte) // slab_bytes for block_id in block_ids]

    def alignment_loss(self, group_idx: int) -> float:
        """Return the share of a slab that a group's blocks leave unused."""
        return 1 - self.blocks_per_slab[group_idx] * self.block_bytes[group_idx] / self.slab_bytes


def lay_out(block_bytes: Sequence[int], *, num_bytes: int | None = None, num_slabs: int | None = None) -> SlabLayout:
    """Choose the smallest slab in which every group's blocks fit nearly without loss.

    Args:
        block_bytes: bytes of a block of each group.
        num_bytes: number of bytes of the range; or
        num_slabs: number of slabs.

    Raises:
        ValueError: both or neither are given, or there is no room for a slab.
    """
    slab_bytes, first_byte = _smallest_slab(block_bytes)
    if (num_bytes is None) == (num_slabs is None):
        raise ValueError("exactly one of num_bytes and num_slabs must be set")
    if num_slabs is None:
        assert num_bytes is not None
        num_slabs = (num_bytes - first_byte) // slab_bytes
    if num_slabs < 1:
        raise ValueError(
            f"an arena needs a slab of {slab_bytes} bytes after the first {first_byte}, got {num_bytes} bytes"
        )
    per_slab = tuple((slab_bytes - slab_loss(slab_bytes, first_byte, size)) // size for size in block_bytes)
    return SlabLayout(tuple(block_bytes), slab_bytes, first_byte, num_slabs, per_slab)


def _smallest_slab(block_bytes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the smallest slab within `MOST_ALIGNMENT_LOSS`, and the offset of slab 0.

    Both are multiples of the largest block. A slab loses less than two blocks of a group, so 200 of the largest are
    always enough.
    """
    largest = max(block_bytes)
    for multiple in count(1):
        slab_bytes = largest * multiple
        for first_byte in range(largest, slab_bytes + 1, largest):
            losses = [slab_loss(slab_bytes, first_byte, size) for size in block_bytes]
            if max(losses) <= MOST_ALIGNMENT_LOSS * slab_bytes:
                return slab_bytes, first_byte
    raise AssertionError("count has no end")


def slab_loss(slab_bytes: int, first_byte: int, block_bytes: int) -> int:
    """Return the maximum bytes of a slab that blocks of a size leave unused: before the first and after the last."""
    if slab_bytes % block_bytes == 0 and first_byte % block_bytes == 0:
        return 0
    # The offset of a slab from the start of a block is a multiple of `grain` bytes.
    grain = gcd(slab_bytes, first_byte, block_bytes)
    usable = (slab_bytes - (block_bytes - grain)) // block_bytes * block_bytes
    return slab_bytes - usable
