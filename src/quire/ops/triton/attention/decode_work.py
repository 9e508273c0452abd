"""Work items of attention for a step of decodes, planned by vectorised operators, and upper bounds on their number.

`work_items.py` plans the same items row by row, for all kinds of steps: it is the reference implementation.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.triton.attention.shared_work import MostShared
from quire.ops.triton.attention.splits import MIN_SPLIT, most_splits

# Number of fields of an item and of a split row; see kernels/attention.py.
ITEM: Final = 8
SPLIT_ROWS: Final = 4


class MostWork(NamedTuple):
    """Upper bounds on the work of decodes, for a number of rows.

    Args:
        num_items: number of items.
        num_places: number of partial results.
        num_split: number of rows whose tokens are in several splits.
    """

    num_items: int
    num_places: int
    num_split: int

    @classmethod
    def of(cls, num_rows: int, tile_tokens: int, num_kv_heads: int, num_processors: int) -> MostWork:
        """Return the bounds for all steps of `num_rows` rows, for contexts of any length.

        A split has at least its share of all tokens, and at least `MIN_SPLIT`; a first split may begin inside a tile,
        so that a row counts for up to a tile more.
        """
        whole = most_splits(num_kv_heads, num_processors, num_rows)
        whole += -(-num_rows * max(0, tile_tokens - 1) // MIN_SPLIT)
        num_split = min(num_rows, whole)
        return cls(num_rows + whole, whole + num_split, num_split)

    def with_shared(self, num_rows: int, shared: MostShared) -> MostWork:
        """Return the bounds for steps that share tokens: then every row may be split."""
        return MostWork(self.num_items, self.num_items + shared.num_places, num_rows)


class DecodeWork(NamedTuple):
    """The items of decodes, on the host.

    Args:
        items: int64 [M, 8]; see `WorkItem`, with a zero at the end.
        split_rows: int64 [S, 4]; see `SplitRows`.
        places: int64 [n], index of the first partial result of each split row.
        counts: int64 [n], number of items of each row.
        parts: int64 [M], split index of each item in its row.
        owners: int64 [M], row of each item.
    """

    items: Tensor
    split_rows: Tensor
    places: Tensor
    counts: Tensor
    parts: Tensor
    owners: Tensor


def num_parts(lengths: Tensor, num_real: int, length: int) -> Tensor:
    """Return the number of items of each row, int64 [n].

    Args:
        lengths: int64 [n], number of tokens of each row, counted from the start of its first tile; overwritten.
        num_real: number of rows that may be split, from the first on.
        length: number of tokens of a split.
    """
    counts = lengths.add_(length - 1).div_(length, rounding_mode="floor")
    if num_real < len(counts):
        counts[num_real:] = 1
    return counts


def parts_of(starts: Tensor, firsts: Tensor, ends: Tensor, parts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the first token and the end of items, int64 [M] each."""
    begin = torch.add(starts, parts, alpha=length)
    return torch.maximum(begin, firsts), torch.minimum(begin.add_(length), ends)


def plan_decodes(
    positions: Tensor,
    firsts: Tensor,
    block_starts: Tensor,
    num_real: int,
    tile_tokens: int,
    length: int,
    num_shared: Tensor | None = None,
) -> DecodeWork:
    """Cut decodes into items as `plan_work` does, by vectorised operators.

    Args:
        positions: int64 [n], position of each row.
        firsts: int64 [n], first token that each row sees and does not share.
        block_starts: int64 [n], index of each row's first block in the block tables.
        num_real: number of rows that may be split, from the first on.
        tile_tokens: number of tokens of a tile.
        length: number of tokens of a split.
        num_shared: int64 [n], number of splits of each row's shared tokens; None without shared tokens.
    """
    ends = positions + 1
    starts = firsts // tile_tokens * tile_tokens
    counts = num_parts(ends - starts, num_real, length)
    all_parts = counts if num_shared is None else counts + num_shared
    is_split = all_parts > 1
    num_places = all_parts * is_split
    places = num_places.cumsum(0) - num_places
    own_places = places if num_shared is None else places + num_shared
    # A row that is not split has -1.
    own_places = ((own_places + 1) * is_split).sub_(1)
    num_items = int(counts.sum())
    if num_items == len(counts):
        owners, parts = torch.arange(num_items), torch.zeros_like(counts)
        begin, end, tables = firsts, ends, block_starts
    else:
        owners = torch.repeat_interleave(counts, output_size=num_items)
        before = counts.cumsum(0) - counts
        rows = torch.stack((positions, block_starts, starts, firsts, ends, own_places, before)).index_select(1, owners)
        positions, tables, starts, firsts, ends, own_places, before = rows.unbind()
        parts = torch.arange(num_items) - before
        begin, end = parts_of(starts, firsts, ends, parts, length)
    ones, zeros = torch.ones_like(owners), torch.zeros_like(owners)
    items = torch.stack((owners, ones, positions, tables, begin, end, own_places + parts, zeros), 1)
    split = is_split.nonzero()[:, 0]
    split_rows = torch.stack((split, torch.ones_like(split), places[split], num_places[split]), 1)
    return DecodeWork(items, split_rows, places, counts, parts, owners)
