"""Shared tokens of captured decodes, remembered from step to step: found again where a step could share others.

Between two steps tables grow, and hardly anything else happens to them; a stamp tells for each whether it has only
grown. What is shared depends on no more of a table than its beginning, up to the first unit of tokens in which it
differs from every other one:

```
 table 0   |<-- shared by 0, 1, 2 -->|<-- differs -->|  anything
 table 1   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
 table 2   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
```

While the stamps are the same, and no row goes on into another whole unit of its beginning, the ranges are too.
`find_shared` is the slow twin, which knows no stamps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.static_steps import vector
from quire.ops.triton.shared_prefixes import (
    PrefixCandidate,
    SharedRange,
    SharingRule,
    find_equal,
    table_bytes,
    unit_bytes,
)
from quire.ops.triton.shared_work import SHARED_ITEM, SHARED_ROW, Sharing


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
        items: list[int] = []
        item_rows: list[int] = []
        member_rows: list[int] = []
        places: list[int] = []
        num_before = dict.fromkeys(sharing.ends, 0)
        for tiles, first, end in sharing.ranges:
            tiled, starts = [], range(first, end, sharing.length)
            for tile in tiles:
                rows = [member.first_row for member in tile]
                tiled.append((len(member_rows), len(rows), rows[0]))
                member_rows += rows
                before = [num_before[row] for row in rows]
                places += before
                num_before.update(zip(rows, [place + len(starts) for place in before], strict=True))
            for part, start in enumerate(starts):
                for first_row, num_rows, row in tiled:
                    items += first_row, num_rows, 0, start, min(start + sharing.length, end), part, 0, 0
                    item_rows.append(row)
        members = torch.zeros(len(member_rows), SHARED_ROW, dtype=torch.int32)
        of_members = vector(member_rows)
        members[:, 0], members[:, 1], members[:, 2] = of_members, vector(places), 1
        return cls(
            vector(sharing.ends),
            vector(sharing.ends.values()),
            vector(map(sharing.num_parts.__getitem__, sharing.ends)),
            vector(items).view(-1, SHARED_ITEM).int(),
            vector(item_rows),
            members,
            of_members,
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
        stamps: stamp of the table of each row, in a list that nobody changes.
        sees_all: bool [n], the row sees its first token.
        rows: int64 [c], rows that see it, and begin with the same block as another one that does not differ in that.
        deciding: int64 [c], whole units up to which the table of each decides what is shared.
        compared: int64 [c], how many of these it had.
        known: the stamps, where there are no such rows; else nothing.
    """

    stamps: Sequence[int]
    sees_all: Tensor
    rows: Tensor
    deciding: Tensor
    compared: Tensor
    known: frozenset[int]

    def knows(self, stamps: Sequence[int]) -> bool:
        """Say whether rows are some of those that shared nothing, and no two of them are of one sequence."""
        own = set(stamps)
        return len(own) == len(stamps) and self.known.issuperset(own)


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
        self._known: dict[int, bytes] = {}  # bytes of tables by their stamps
        self.ranges: Sequence[SharedRange] = ()
        self.sharing = no_sharing()

    def find(
        self, positions: Tensor, firsts: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]
    ) -> bool:
        """Find what a step shares; say whether reading it once pays.

        Args:
            positions: int64 [n], position of each row in its sequence; on the host, as all here.
            firsts: int64 [n], first token that each row sees.
            block_ids: int64, block tables of the sequences.
            block_starts: int64 [n], where each table starts.
            stamps: see `StaticTokens.share`.
        """
        seen = self._seen
        # Fewer rows share no more than all of them did, and neither do those that no longer see their first token.
        if seen is not None and not seen.rows.numel() and (seen.stamps is stamps or seen.knows(stamps)):
            return False
        sees_all = firsts == 0
        if seen is None or not self._is_seen(seen, sees_all, positions, stamps):
            self._find(sees_all, positions, block_ids, block_starts, stamps)
        return bool(self.ranges)

    def _is_seen(self, seen: Seen, sees_all: Tensor, positions: Tensor, stamps: Sequence[int]) -> bool:
        """Say whether the ranges that were found last are those of a step too."""
        if seen.stamps != stamps or not torch.equal(sees_all, seen.sees_all):
            return False
        return torch.equal(self._compared(seen.rows, seen.deciding, positions), seen.compared)

    def _compared(self, rows: Tensor, deciding: Tensor, positions: Tensor) -> Tensor:
        """Return how many of the units that decide the table of each row has, int64 [c]."""
        units = positions.index_select(0, rows).div_(self._rule.unit, rounding_mode="floor")
        return torch.minimum(units, deciding)

    def _find(
        self, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]
    ) -> None:
        """Find the ranges of a step, and keep what they were found from."""
        self._seen = None  # if this fails, the next step does it again
        # Where no two sequences begin with the same block, nothing else is looked at.
        heads = block_ids.index_select(0, block_starts).tolist()
        counts = Counter(heads)
        of_all = zip(heads, sees_all.tolist(), block_starts.tolist(), positions.tolist(), strict=True)
        candidates = [
            PrefixCandidate(row, 1, table, position)
            for row, (head, sees, table, position) in enumerate(of_all)
            if sees and counts[head] > 1
        ]
        found = find_equal(candidates, self._unit_bytes(candidates, block_ids, stamps), self._rule)
        self.ranges, self.sharing = found.ranges, no_sharing()
        if found.ranges:
            sharing = Sharing.of(found.ranges, self._rule, self._num_kv_heads, self._num_processors)
            self.sharing = DecodeSharing.of(sharing)
        rows = vector([each.first_row for each in candidates])
        deciding = vector(found.deciding) // self._rule.unit
        compared = self._compared(rows, deciding, positions)
        known = frozenset(() if candidates else stamps)
        self._seen = Seen(stamps, sees_all, rows, deciding, compared, known)

    def _unit_bytes(
        self, candidates: Sequence[PrefixCandidate], block_ids: Tensor, stamps: Sequence[int]
    ) -> list[bytes]:
        """Return the whole units of the tables of candidates: those of tables that have only grown are known."""
        rule, known, tables = self._rule, self._known, table_bytes(block_ids)
        unit, num_bytes = rule.unit, rule.unit_bytes
        later: dict[int, bytes] = {}
        keys: list[bytes] = []
        for row, _, table, num_tokens in candidates:
            stamp, num_units = stamps[row], num_tokens // unit
            key = known.get(stamp, b"")
            if len(key) != num_units * num_bytes:
                key = unit_bytes(tables, table, num_units, rule)
            later[stamp] = key
            keys.append(key)
        self._known = later
        return keys
