"""Finds shared prefixes, on the host: sequences whose tables begin with the same blocks, if reading them once pays.

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

# Maximum number of consecutive ranges that a sequence can share, each with fewer sequences than the previous one: a
# system prompt, a conversation, the samples of its answer. Without a limit, the buffers of captured steps would need
# room for as many ranges as there are sequences.
MAX_RANGES: Final = 4
# Memory passes over the two partial results that a shared range adds per row, one for the range and one for the rest of
# the context, which would be a final result otherwise. Each is written once and read once.
PARTIAL_PASSES: Final = 2 * 2
# Minimum tokens of a shared range: a shorter one costs more in partial results than it saves in keys and values.
MIN_SHARED: Final = 256
# Bytes of a block id.
ID_BYTES: Final = 8


class SharingRule(NamedTuple):
    """Cost model that decides which shared tokens are read once, because that moves fewer bytes, per KV head.

    Args:
        tile: tile of a program over shared tokens.
        group: number of query heads of a KV head.
        unit: number of tokens; shared ranges end at multiples of it.
        block_size: N.
        token_bytes: bytes of a token's key and value.
        partial_bytes: bytes of a row's partial result.
        least_bytes: bytes that all ranges together must save.
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
        """Minimum number of tokens of a range, a multiple of the unit."""
        return -(-MIN_SHARED // self.unit) * self.unit

    @classmethod
    def of(
        cls, tile: Tile, decode: Tile, group: int, block_size: int, token_bytes: int, dim: int, least_bytes: float
    ) -> SharingRule:
        """Return the rule for layers with `group` query heads per KV head."""
        unit = lcm(block_size, tile.tokens, decode.tokens)
        return cls(tile, group, unit, block_size, token_bytes, group * 4 * (dim + 2), least_bytes)

    def saved_bytes(self, num_rows: int, num_sequences: int, num_tokens: int) -> int:
        """Return the bytes of memory traffic saved if a range is read once for each tile of its rows."""
        num_tiles = -(-num_rows // self.tile_rows) if self.tile_rows else num_sequences
        saved = (num_sequences - num_tiles) * num_tokens * self.token_bytes
        return saved - num_rows * self.partial_bytes * PARTIAL_PASSES


class PrefixCandidate(NamedTuple):
    """A sequence that may share a prefix.

    Args:
        first_row: index of its first row in the step.
        num_rows: number of its rows, which all fit into one tile.
        table: index of its first block in `block_ids`.
        num_tokens: number of tokens at its start that all its rows see, excluding the rows' own tokens.
    """

    first_row: int
    num_rows: int
    table: int
    num_tokens: int


class SharedRange(NamedTuple):
    """A range of tokens for which several sequences have the same blocks.

    Args:
        members: the sequences.
        first: first token.
        end: end of the tokens.
    """

    members: Sequence[PrefixCandidate]
    first: int
    end: int


class FoundRanges(NamedTuple):
    """Shared ranges, and the length of the table prefixes that determine them.

    Args:
        ranges: ranges of tokens that are read once; the ranges of a sequence are contiguous from its first token on.
        deciding: number of tokens of each candidate whose blocks determine the ranges, in whole units: up to and
            including the unit in which it differs from all others. A candidate may have fewer tokens than that.
    """

    ranges: Sequence[SharedRange]
    deciding: Sequence[int]


def find_shared(candidates: Sequence[PrefixCandidate], block_ids: Tensor, rule: SharingRule) -> FoundRanges:
    """Find the ranges of tokens that are read once."""
    tables = _table_bytes(block_ids)
    keys = [_unit_bytes(tables, candidate, rule) for candidate in candidates]
    deciding = [rule.least_tokens] * len(candidates)
    if rule.tile_rows < 2:  # no two rows are read together
        return FoundRanges([], deciding)
    num_bytes = rule.least_tokens // rule.block_size * ID_BYTES
    by_beginning: dict[bytes, dict[int, bytes]] = defaultdict(dict)
    for idx, (candidate, key) in enumerate(zip(candidates, keys, strict=True)):
        if len(key) >= num_bytes and candidate.num_rows <= rule.tile_rows:
            by_beginning[key[:num_bytes]][idx] = key
    ranges: list[SharedRange] = []
    saved = 0
    for alike in by_beginning.values():
        if len(alike) > 1:
            for shared_range, bytes_saved in _ranges(alike, candidates, rule, deciding):
                ranges.append(shared_range)
                saved += bytes_saved
    return FoundRanges(ranges if saved > rule.least_bytes else [], deciding)


def _table_bytes(block_ids: Tensor) -> memoryview:
    """Return the bytes of block tables on the host: comparing bytes is faster than comparing ids, without numpy."""
    return memoryview((ctypes.c_char * block_ids.nbytes).from_address(block_ids.data_ptr()))


def _unit_bytes(tables: memoryview, candidate: PrefixCandidate, rule: SharingRule) -> bytes:
    """Return the bytes of the whole units of a candidate's table, copied from the bytes of all tables."""
    start = candidate.table * ID_BYTES
    return bytes(tables[start : start + candidate.num_tokens // rule.unit * rule.unit_bytes])


def _ranges(
    alike: Mapping[int, bytes],
    candidates: Sequence[PrefixCandidate],
    rule: SharingRule,
    deciding: list[int],
) -> Iterator[tuple[SharedRange, int]]:
    """Yield the ranges of sequences with equal first blocks, and the bytes that each saves; update `deciding`.

    This walks a radix tree depth first: a node is a group of sequences with the same blocks so far, divided by their
    next unit. Sequences are sorted by table, so a group is contiguous, and its first and last member give the common
    length.
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
            else:  # the tables end here, or share nothing more
                for idx in order[start + first : start + last]:
                    deciding[idx] = end + rule.unit
            first = last


def _num_equal(one: bytes, other: bytes, size: int, low: int) -> int:
    """Return the number of leading parts of `size` bytes that are equal; the first `low` are known to be equal."""
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
