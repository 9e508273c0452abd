"""Shared tokens of captured decodes, remembered from step to step: found again where a step could share others.

Between two steps tables grow, and hardly anything else happens to them. What is shared depends on no more of a table
than its beginning, up to the first unit of tokens in which it differs from every other one:

```
 table 0   |<-- shared by 0, 1, 2 -->|<-- differs -->|  anything
 table 1   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
 table 2   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
```

While the rows are the same and the bytes of these beginnings are, whoever has them, the ranges are too.
`find_shared` is the slow twin.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.triton.shared_prefixes import (
    ID_BYTES,
    FoundRanges,
    PrefixCandidate,
    SharedRange,
    SharingRule,
    find_shared,
    table_bytes,
)
from quire.ops.triton.shared_work import SHARED_ITEM, SHARED_ROW, Sharing


def _table(numbers: array[int], width: int) -> Tensor:
    """Return numbers of 32 bits as [., width]."""
    if not numbers:
        return torch.zeros(0, width, dtype=torch.int32)
    return torch.frombuffer(numbers, dtype=torch.int32).view(-1, width)


def _vector(numbers: Iterable[int]) -> Tensor:
    """Return int64 [n]: a tensor over an array is made in a fraction of the time that one of a list takes."""
    made = array("q", numbers)
    return torch.frombuffer(made, dtype=torch.int64) if made else torch.zeros(0, dtype=torch.int64)


class DecodeSharing(NamedTuple):
    """Tokens that decodes share, as numbers for all rows at once: `Sharing` without where tables and places begin.

    Args:
        rows: int64 [s], rows that share tokens.
        ends: int64 [s], end of the tokens that each shares.
        num_parts: int64 [s], number of parts in which these are.
        items: int32 [m, 8], see `SharedItem`; tables are 0.
        item_rows: int64 [m], row whose table each item reads.
        item_members: int32 [r, 4], see `SharedRow`; places count from the first partial result of the row.
        member_rows: int64 [r], row of each.
    """

    rows: Tensor
    ends: Tensor
    num_parts: Tensor
    items: Tensor
    item_rows: Tensor
    item_members: Tensor
    member_rows: Tensor

    @classmethod
    def of(cls, sharing: Sharing) -> DecodeSharing:
        """Return what some decodes share, of one row each; `Sharing.work` is the slow twin of the items."""
        items, members = array("i"), array("i")
        item_rows: list[int] = []
        num_before = dict.fromkeys(sharing.ends, 0)
        for tiles, first, end in sharing.ranges:
            tiled, starts = [], range(first, end, sharing.length)
            for tile in tiles:
                rows = [member.first_row for member in tile]
                tiled.append((len(members) // SHARED_ROW, len(rows), rows[0]))
                for row in rows:
                    before = num_before[row]
                    members.extend((row, before, 1, 0))
                    num_before[row] = before + len(starts)
            for part, start in enumerate(starts):
                for first_row, num_rows, row in tiled:
                    items.extend((first_row, num_rows, 0, start, min(start + sharing.length, end), part, 0, 0))
                    item_rows.append(row)
        member_table = _table(members, SHARED_ROW)
        return cls(
            _vector(sharing.ends),
            _vector(sharing.ends.values()),
            _vector(map(sharing.num_parts.__getitem__, sharing.ends)),
            _table(items, SHARED_ITEM),
            _vector(item_rows),
            member_table,
            member_table[:, 0].long(),
        )

    def work(self, block_starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the items of a step, and their rows, as `Sharing.work` does.

        Args:
            block_starts: int64 [n], index of each row's first block in the block tables.
            places: int64 [n], index of each row's first partial result.

        Returns:
            Items, int32 [m, 8], and rows, int32 [r, 4].
        """
        if not len(self.items):
            return self.items, self.item_members
        items, members = self.items.clone(), self.item_members.clone()
        items[:, 2] = block_starts[self.item_rows]
        members[:, 1] += places[self.member_rows]
        return items, members


@cache
def no_sharing() -> DecodeSharing:
    """Return the sharing of decodes that share nothing: made at the first use, as imports make no tensor."""
    return DecodeSharing.of(Sharing((), 0, {}, {}))


class Seen(NamedTuple):
    """All that ranges were found from.

    Args:
        heads: int64 [n], first block of each row.
        sees_all: bool [n], the row sees its first token.
        rows: int64 [c], rows that see it, and begin with the same block as another one that does not differ in that.
        deciding: int64 [c], whole units up to which the table of each decides what is shared.
        compared: int64 [c], how many of these it had.
        num_bytes: their bytes in the table of each; none where it is too short to share.
        beginnings: those bytes.
    """

    heads: Tensor
    sees_all: Tensor
    rows: Tensor
    deciding: Tensor
    compared: Tensor
    num_bytes: Sequence[int]
    beginnings: Sequence[bytes]


class SharedDecodes:
    """Finds what the decodes of a cache group share, and remembers it for the next step.

    Args:
        rule: rule by which reading once pays.
        num_kv_heads: K; each head has programs of its own.
        num_processors: number of processors of the GPU.

    Attributes:
        ranges: ranges that were found last; of a step that needed no new ones, their sequences have the tables and
            tokens of the step that did.
        sharing: these as numbers.
    """

    def __init__(self, rule: SharingRule, num_kv_heads: int, num_processors: int) -> None:
        self._rule, self._num_kv_heads, self._num_processors = rule, num_kv_heads, num_processors
        self._seen: Seen | None = None
        self.ranges: Sequence[SharedRange] = ()
        self.sharing = no_sharing()

    def find(self, positions: Tensor, firsts: Tensor, block_ids: Tensor, block_starts: Tensor) -> bool:
        """Find what a step shares; say whether reading it once pays.

        Args:
            positions: int64 [n], position of each row in its sequence; on the host, as all here.
            firsts: int64 [n], first token that each row sees.
            block_ids: int64, block tables of the sequences, one behind the other.
            block_starts: int64 [n], where each table starts.
        """
        heads, sees_all = block_ids[block_starts], firsts == 0
        if self._seen is None or not self._is_seen(self._seen, heads, sees_all, positions, block_ids, block_starts):
            self._find(heads, sees_all, positions, block_ids, block_starts)
        return bool(self.ranges)

    def _is_seen(
        self, seen: Seen, heads: Tensor, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor
    ) -> bool:
        """Say whether the ranges that were found last are those of a step too."""
        if not (torch.equal(heads, seen.heads) and torch.equal(sees_all, seen.sees_all)):
            return False
        compared = torch.minimum(positions[seen.rows] // self._rule.unit, seen.deciding)
        if not torch.equal(compared, seen.compared):
            return False
        starts = (block_starts[seen.rows] * ID_BYTES).tolist()
        return _beginnings(block_ids, starts, seen.num_bytes) == seen.beginnings

    def _find(
        self, heads: Tensor, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor
    ) -> None:
        """Find the ranges of a step, and keep what they were found from."""
        # Where no two sequences begin with the same block, nothing else is looked at.
        ids = heads.tolist()
        counts = Counter(ids)
        of_all = zip(ids, sees_all.tolist(), block_starts.tolist(), positions.tolist(), strict=True)
        candidates = [
            PrefixCandidate(row, 1, table, position)
            for row, (head, sees, table, position) in enumerate(of_all)
            if sees and counts[head] > 1
        ]
        rows = _vector([each.first_row for each in candidates])
        tables, tokens = block_starts[rows], positions[rows]
        found = find_shared(candidates, block_ids, self._rule) if candidates else FoundRanges((), ())
        self.ranges, self.sharing = found.ranges, no_sharing()
        if found.ranges:
            sharing = Sharing.of(found.ranges, self._rule, self._num_kv_heads, self._num_processors)
            self.sharing = DecodeSharing.of(sharing)
        deciding = _vector(found.deciding) // self._rule.unit
        compared = torch.minimum(tokens // self._rule.unit, deciding)
        unit_bytes = self._rule.unit // self._rule.block_size * ID_BYTES
        num_bytes = (compared * (tokens >= self._rule.least_tokens) * unit_bytes).tolist()
        beginnings = _beginnings(block_ids, (tables * ID_BYTES).tolist(), num_bytes)
        self._seen = Seen(heads, sees_all, rows, deciding, compared, num_bytes, beginnings)


def _beginnings(block_ids: Tensor, starts: Sequence[int], num_bytes: Sequence[int]) -> list[bytes]:
    tables = table_bytes(block_ids)
    return [bytes(tables[start : start + size]) for start, size in zip(starts, num_bytes, strict=True)]
