"""Sequences of a step that begin with the same blocks, where reading these once pays: found on the host.

```
 table 0   |<-- shared by 0, 1, 2 -->|<-- its own -->|
 table 1   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- its own -->|
 table 2   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- its own ------->|
```
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import lcm
from operator import itemgetter
from typing import Final, NamedTuple

from torch import Tensor

from quire.ops.triton.tiles import Tile

# Ranges that a sequence can share, one behind the other, each with fewer sequences than the one before: a system
# prompt, a conversation, the samples of its answer. Without a limit, captured steps would need room for as many as
# there are sequences.
MAX_RANGES: Final = 4
# Partial results that each row of a shared range adds: that of the range, and that of what is behind it, which would be
# no partial result otherwise. Each is written and read.
PARTIAL_PASSES: Final = 2 * 2
# Tokens of the shortest range that is shared: a shorter one costs more in partial results than it saves in keys.
MIN_SHARED: Final = 256
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
    def unit_bytes(self) -> int:
        """Bytes of a unit's block ids."""
        return self.unit // self.block_size * ID_BYTES

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest range, a multiple of the unit."""
        return -(-MIN_SHARED // self.unit) * self.unit

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


class FoundRanges(NamedTuple):
    """Ranges that sequences share, and how much of each table they were found from.

    Args:
        ranges: ranges of tokens that are read once; of a sequence, they follow each other from its first token on.
        deciding: number of tokens of each candidate whose blocks decide on that, in whole units: those up to where it
            differs from all others, and a unit more; whether it has so many decides too.
    """

    ranges: Sequence[SharedRange]
    deciding: Sequence[int]


def find_shared(candidates: Sequence[PrefixCandidate], block_ids: Tensor, rule: SharingRule) -> FoundRanges:
    """Find the ranges of tokens that are read once.

    Args:
        candidates: sequences of the step, in its order.
        block_ids: block tables, int64 on the host.
        rule: rule by which reading once pays.

    Returns:
        Ranges: none where all together save too little.
    """
    tables = _table_bytes(block_ids)
    keys = [_unit_bytes(tables, each, rule) for each in candidates]
    deciding = [rule.least_tokens] * len(candidates)
    if rule.tile_rows < 2:  # no two rows are read together
        return FoundRanges([], deciding)
    num_bytes = rule.least_tokens // rule.block_size * ID_BYTES
    by_beginning: dict[bytes, dict[int, bytes]] = defaultdict(dict)
    for idx, (candidate, key) in enumerate(zip(candidates, keys, strict=True)):
        if len(key) >= num_bytes and candidate.num_rows <= rule.tile_rows:
            by_beginning[key[:num_bytes]][idx] = key
    found: list[SharedRange] = []
    saved = 0
    for alike in by_beginning.values():
        if len(alike) > 1:
            for each, bytes_saved in _ranges(alike, candidates, rule, deciding):
                found.append(each)
                saved += bytes_saved
    return FoundRanges(found if saved > rule.least_bytes else [], deciding)


def _table_bytes(block_ids: Tensor) -> memoryview:
    """Return the bytes of block tables on the host: they are compared faster than numbers, and without numpy."""
    return memoryview((ctypes.c_char * block_ids.nbytes).from_address(block_ids.data_ptr()))


def _unit_bytes(tables: memoryview, candidate: PrefixCandidate, rule: SharingRule) -> bytes:
    """Return the bytes of the whole units of a candidate's table, of the bytes of all tables."""
    start = candidate.table * ID_BYTES
    return bytes(tables[start : start + candidate.num_tokens // rule.unit * rule.unit_bytes])


def _ranges(
    alike: Mapping[int, bytes],
    candidates: Sequence[PrefixCandidate],
    rule: SharingRule,
    deciding: list[int],
) -> Iterator[tuple[SharedRange, int]]:
    """Yield the ranges of sequences that begin alike, the bytes that each saves, and write down what decided on them.

    Sequences go together as far as all have the same blocks, and are divided by their next unit. They are in the order
    of their tables, so those that go together are neighbours, and the first and the last tell how far.
    """
    size = rule.unit_bytes
    num_equal = _num_equal(min(alike.values()), max(alike.values()), size, 0)
    different = itemgetter(slice(num_equal * size, None))
    order = sorted(alike, key=lambda idx: different(alike[idx]))
    keys = [alike[idx] for idx in order]
    rows_before = list(accumulate((candidates[idx].num_rows for idx in order), initial=0))
    open_parts = [(0, len(order), num_equal, 0, 0)]
    while open_parts:
        start, stop, num_equal, begin, depth = open_parts.pop()
        num_equal = _num_equal(keys[start], keys[stop - 1], size, num_equal)
        end = num_equal * rule.unit
        saved = rule.saved_bytes(rows_before[stop] - rows_before[start], stop - start, end - begin)
        if end - begin >= rule.least_tokens and saved > 0:
            yield SharedRange([candidates[idx] for idx in sorted(order[start:stop])], begin, end), saved
            begin, depth = end, depth + 1
        next_unit = itemgetter(slice(num_equal * size, (num_equal + 1) * size))
        units = list(map(next_unit, keys[start:stop]))
        first = 0
        while first < len(units):
            last = bisect_right(units, units[first], first + 1)
            if units[first] and last - first > 1 and depth < MAX_RANGES:
                open_parts.append((start + first, start + last, num_equal + 1, begin, depth))
            else:  # they end here, or nothing more is shared
                for idx in order[start + first : start + last]:
                    deciding[idx] = end + rule.unit
            first = last


def _num_equal(one: bytes, other: bytes, size: int, low: int) -> int:
    """Return how many parts of some bytes are equal at the beginning of both: `low` of them at least."""
    high = min(len(one), len(other)) // size
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
