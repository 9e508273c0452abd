"""Sequences of a step that begin with the same blocks, where reading these once pays: found on the host.

```
 table 0   |<-- shared by 0, 1, 2 -->|<-- its own -->|
 table 1   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- its own -->|
 table 2   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- its own ------->|
```
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm
from typing import Final, NamedTuple

from torch import Tensor

from quire.ops.triton.splits import MIN_SPLIT
from quire.ops.triton.tiles import Tile

# Ranges that a sequence can share, one behind the other, each with fewer sequences than the one before: a system
# prompt, a conversation, the samples of its answer. Without a limit, captured steps would need room for as many as
# there are sequences.
MAX_RANGES: Final = 4
# Partial results that each row of a shared range adds: that of the range, and that of what is behind it, which would be
# no partial result otherwise. Each is written and read.
PARTIAL_PASSES: Final = 2 * 2
# Bytes of a block id.
ID_BYTES: Final = 8


class SharingRule(NamedTuple):
    """Rule by which tokens are shared: where that moves fewer bytes, of one KV head.

    Args:
        tile: tile of a program over shared tokens.
        group: number of query heads of a KV head.
        unit: shared ranges end at multiples of these tokens.
        block_size: N.
        token_bytes: bytes of a token's key and value.
        partial_bytes: bytes of a row's partial result.
        least_bytes: bytes that must be saved by all ranges together.
    """

    tile: Tile
    group: int
    unit: int
    block_size: int
    token_bytes: int
    partial_bytes: int
    least_bytes: float

    @property
    def tile_rows(self) -> int:
        """Number of rows in a tile."""
        return self.tile.rows // self.group

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest range: as for splits, less costs more in partial results than it brings."""
        return -(-MIN_SPLIT // self.unit) * self.unit

    @classmethod
    def of(
        cls, tile: Tile, decode: Tile, group: int, block_size: int, token_bytes: int, dim: int, least_bytes: float
    ) -> SharingRule:
        """Return the rule for layers with `group` query heads to a KV head.

        Args:
            tile: tile of a program over shared tokens.
            decode: tile of a program over a sequence's own tokens, of which the first begins where the shared ones end.
            group: number of query heads of a KV head.
            block_size: N.
            token_bytes: bytes of a token's key and value in one KV head.
            dim: numbers of a head in a partial result.
            least_bytes: bytes that must be saved, of one KV head.
        """
        unit = lcm(block_size, tile.tokens, decode.tokens)
        return cls(tile, group, unit, block_size, token_bytes, group * 4 * (dim + 2), least_bytes)

    def saved_bytes(self, num_rows: int, num_sequences: int, num_tokens: int) -> int:
        """Return the bytes that are not moved if a range is read once for each tile of its rows."""
        num_tiles = -(-num_rows // self.tile_rows) if self.tile_rows else num_sequences
        saved = (num_sequences - num_tiles) * num_tokens * self.token_bytes
        return saved - num_rows * self.partial_bytes * PARTIAL_PASSES


class PrefixCandidate(NamedTuple):
    """A sequence that may share what it begins with.

    Args:
        first_row: index of its first row in the step.
        num_rows: number of its rows; all in one tile.
        table: index of its first block in `block_ids`.
        num_tokens: tokens that all its rows see and none of them is, from the first on.
    """

    first_row: int
    num_rows: int
    table: int
    num_tokens: int


class SharedRange(NamedTuple):
    """Tokens of several sequences that lie in the same blocks.

    Args:
        members: the sequences.
        first: first token.
        end: end of the tokens.
    """

    members: Sequence[PrefixCandidate]
    first: int
    end: int


def find_shared(candidates: Sequence[PrefixCandidate], block_ids: Tensor, rule: SharingRule) -> list[SharedRange]:
    """Return the ranges of tokens that are read once; of a sequence, they follow each other from its first token on.

    Args:
        candidates: sequences of the step, in its order.
        block_ids: block tables, int64 on the host.
        rule: rule by which reading once pays.

    Returns:
        Ranges, those of a sequence in the order of its tokens. None where all together save too little.
    """
    found: list[SharedRange] = []
    saved = 0
    # Bytes are compared faster than numbers; this needs no numpy.
    tables = memoryview((ctypes.c_char * block_ids.nbytes).from_address(block_ids.data_ptr()))
    for members in _with_equal_beginnings(candidates, tables, rule):
        for each, bytes_saved in _ranges(members, tables, rule):
            found.append(each)
            saved += bytes_saved
    return found if saved > rule.least_bytes else []


def _with_equal_beginnings(
    candidates: Sequence[PrefixCandidate], tables: memoryview, rule: SharingRule
) -> Iterator[list[PrefixCandidate]]:
    """Yield sequences whose first blocks are the same, as many as the shortest range has."""
    num_bytes = rule.least_tokens // rule.block_size * ID_BYTES
    by_beginning: dict[bytes, list[PrefixCandidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.num_tokens >= rule.least_tokens and candidate.num_rows <= rule.tile_rows:
            start = candidate.table * ID_BYTES
            by_beginning[bytes(tables[start : start + num_bytes])].append(candidate)
    for members in by_beginning.values():
        if len(members) > 1:
            yield members


def _ranges(
    members: Sequence[PrefixCandidate], tables: memoryview, rule: SharingRule
) -> Iterator[tuple[SharedRange, int]]:
    """Yield the ranges of sequences that share some, those of more sequences first, and the bytes that each saves."""
    unit_bytes = rule.unit // rule.block_size * ID_BYTES

    def blocks(candidate: PrefixCandidate) -> bytes:
        start = candidate.table * ID_BYTES
        return bytes(tables[start : start + candidate.num_tokens // rule.unit * unit_bytes])

    # In the order of their blocks, what two sequences share is the least that neighbours between them do.
    keyed = sorted((blocks(candidate), candidate) for candidate in members)
    common = [_num_equal(one, other, unit_bytes) * rule.unit for (one, _), (other, _) in pairwise(keyed)]
    members = [candidate for _, candidate in keyed]
    open_parts = [(0, len(members), 0, 0)]
    while open_parts:
        low, high, begin, depth = open_parts.pop()
        if high - low < 2 or depth == MAX_RANGES:
            continue
        end, part = min(common[low : high - 1]), members[low:high]
        saved = rule.saved_bytes(sum(each.num_rows for each in part), len(part), end - begin)
        if end - begin >= rule.least_tokens and saved > 0:
            yield SharedRange(part, begin, end), saved
            begin, depth = end, depth + 1
        cuts = [low, *(idx + 1 for idx in range(low, high - 1) if common[idx] == end), high]
        open_parts.extend((one, other, begin, depth) for one, other in pairwise(cuts))


def _num_equal(one: bytes, other: bytes, size: int) -> int:
    """Return how many parts of some bytes are equal at the beginning of both."""
    low, high = 0, min(len(one), len(other)) // size
    if one[: high * size] == other[: high * size]:
        return high
    # The first `low` parts are equal, the first `high` are not.
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * size : middle * size] == other[low * size : middle * size]:
            low = middle
        else:
            high = middle
    return low
