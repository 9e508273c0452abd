"""The shared tokens of a step's sequences, cut into work items for programs: on the host, once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from quire.ops.triton.attention.shared_prefixes import MAX_RANGES, PrefixCandidate, SharedRange, SharingRule
from quire.ops.triton.attention.splits import most_splits, split_length

# Number of fields of an item and of a row; see kernels/shared_attention.py.
SHARED_ITEM: Final = 8
SHARED_ROW: Final = 4


class SharedItem(NamedTuple):
    """Rows of several sequences, and a range of their shared tokens.

    Args:
        first_row: index of the first of its rows among the `SharedRow`s.
        num_rows: number of rows; one tile holds them.
        table: index of the first block of one of the sequences in `block_ids`.
        first: first token.
        end: end of the tokens.
        part: index of this split of the shared range.
    """

    first_row: int
    num_rows: int
    table: int
    first: int
    end: int
    part: int


class SharedRow(NamedTuple):
    """A row that sees the tokens of a shared range.

    Args:
        row: index of the row in the step.
        place: index of its partial result for the first split of the range.
        stride: stride to the partial result for the next split: number of rows of its sequence.
    """

    row: int
    place: int
    stride: int


class SharedWork(NamedTuple):
    """The items of a step's shared tokens.

    Args:
        items: items; items over the same tokens are adjacent, so that their keys and values hit in L2.
        rows: rows of the items.
    """

    items: Sequence[SharedItem]
    rows: Sequence[SharedRow]


class TiledRange(NamedTuple):
    """A shared range with its sequences in tiles.

    Args:
        tiles: sequences of each tile.
        first: first token.
        end: end of the tokens.
    """

    tiles: Sequence[Sequence[PrefixCandidate]]
    first: int
    end: int


class Sharing(NamedTuple):
    """Tokens that sequences of a step share. A sequence is identified by its first row.

    Args:
        ranges: shared ranges; the ranges of a sequence are in the order of its tokens.
        length: number of tokens of a split.
        ends: end of each sequence's shared tokens.
        num_parts: number of splits of each sequence's shared tokens.
    """

    ranges: Sequence[TiledRange]
    length: int
    ends: Mapping[int, int]
    num_parts: Mapping[int, int]

    @classmethod
    def of(
        cls, shared_ranges: Sequence[SharedRange], rule: SharingRule, num_kv_heads: int, num_processors: int
    ) -> Sharing:
        """Cut shared ranges into splits, and divide their sequences among tiles."""
        ranges = [
            TiledRange(list(_tiles(shared_range.members, rule.tile_rows)), shared_range.first, shared_range.end)
            for shared_range in shared_ranges
        ]
        num_tokens = sum(len(tiled_range.tiles) * (tiled_range.end - tiled_range.first) for tiled_range in ranges)
        length = split_length(num_tokens, num_kv_heads, num_processors, rule.tile.tokens)
        ends: dict[int, int] = {}
        num_parts: dict[int, int] = {}
        for members, first, end in shared_ranges:
            parts = -(-(end - first) // length)
            for member in members:
                row = member.first_row
                ends[row], num_parts[row] = end, num_parts.get(row, 0) + parts
        return cls(ranges, length, ends, num_parts)

    def work(self, places: Mapping[int, int]) -> SharedWork:
        """Return the items."""
        items: list[SharedItem] = []
        rows: list[SharedRow] = []
        num_before: Counter[int] = Counter()
        for tiles, first, end in self.ranges:
            tiled = []
            for members in tiles:
                first_row = len(rows)
                for member in members:
                    partial_idx = places[member.first_row] + num_before[member.first_row] * member.num_rows
                    rows.extend(
                        SharedRow(member.first_row + idx, partial_idx + idx, member.num_rows)
                        for idx in range(member.num_rows)
                    )
                tiled.append((first_row, len(rows) - first_row, members[0].table))
            starts = range(first, end, self.length)
            items.extend(
                SharedItem(*tile, start, min(start + self.length, end), part)
                for part, start in enumerate(starts)
                for tile in tiled
            )
            num_before.update({member.first_row: len(starts) for members in tiles for member in members})
        return SharedWork(items, rows)


NOTHING_SHARED: Final = Sharing((), 0, {}, {})


class MostShared(NamedTuple):
    """Upper bounds on the shared work of decodes, for a number of rows.

    Args:
        num_items: number of items.
        num_rows: number of rows of items.
        num_places: number of partial results.
    """

    num_items: int
    num_rows: int
    num_places: int

    @classmethod
    def of(cls, num_rows: int, tile_rows: int, num_kv_heads: int, num_processors: int) -> MostShared:
        """Return the bounds for all steps of `num_rows` rows.

        A row is in at most `MAX_RANGES` ranges, and a range has at least two rows and at most one tile that is not
        full. Each split is full or the last one of its range.
        """
        full, rows = most_splits(num_kv_heads, num_processors), MAX_RANGES * num_rows
        num_tiles = rows // max(1, tile_rows) + rows // 2
        return cls(full + num_tiles, rows, full * tile_rows + rows)


def _tiles(members: Sequence[PrefixCandidate], tile_rows: int) -> Iterator[Sequence[PrefixCandidate]]:
    """Yield the sequences of each tile."""
    tile: list[PrefixCandidate] = []
    num_rows = 0
    for member in members:
        if num_rows + member.num_rows > tile_rows:
            yield tile
            tile, num_rows = [], 0
        tile.append(member)
        num_rows += member.num_rows
    if tile:
        yield tile
