"""Shared tokens of captured decodes, cached from step to step: searched again only if they may have changed.

Between two steps, block tables usually only grow; a table's stamp is unchanged if it has only grown. The shared ranges
depend only on the beginning of each table, up to the first unit of tokens in which it differs from every other table:

```
 table 0   |<-- shared by 0, 1, 2 -->|<-- differs -->|  anything
 table 1   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
 table 2   |<-- shared by 0, 1, 2 -->|<-- shared by 1, 2 -->|<-- differs -->|  anything
```

While the stamps are the same, and no row has completed another unit of this beginning, the ranges are the same too.
`find_shared` is the reference implementation, without stamps.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.native_step_work import FoundSharingCall, SharedDecodeRowsCall, StepWorkKernels
from quire.ops.interface.static_steps import vector
from quire.ops.triton.attention.shared_prefixes import PrefixCandidate, SharingRule, find_shared
from quire.ops.triton.attention.shared_work import SHARED_ITEM, SHARED_ROW, MostShared, Sharing
from quire.ops.triton.attention.step_numbers import sharing_call


class DecodeSharing(NamedTuple):
    """Shared tokens of decodes as tensors: `Sharing` without offsets of tables and of partial results.

    Args:
        rows: int64 [s], rows that share tokens.
        ends: int64 [s], end of each row's shared tokens.
        num_parts: int64 [s], number of splits of each row's shared tokens.
        items: int32 [m, 8], see `SharedItem`; tables are 0.
        item_rows: int64 [m], row whose table each item reads.
        item_members: int32 [r, 4], see `SharedRow`; `place` is relative to the first partial result of the row.
        member_rows: int64 [r], row of each member.
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
        """Return the sharing of decodes of one row each; `Sharing.work` is the reference for the items."""
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
                num_before.update(zip(rows, [count + len(starts) for count in before], strict=True))
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
    """Return the sharing of decodes that share nothing; made at first use, since imports must create no tensors."""
    return DecodeSharing.of(Sharing((), 0, {}, {}))


class Seen(NamedTuple):
    """The inputs that determined the ranges of the last search: the key of the cache.

    Args:
        stamps: stamp of the table of each row, in a list that is never changed.
        sees_all: bool [n], True if the row sees its first token.
        rows: int64 [c], candidates: rows that see their first token and share their first block with another row.
        deciding: int64 [c], number of leading units of each candidate's table that determine the ranges.
        compared: int64 [c], number of these units that the candidate's table had.
        unshared_stamps: set of the stamps if there are no candidates, else empty.
    """

    stamps: Sequence[int]
    sees_all: Tensor
    rows: Tensor
    deciding: Tensor
    compared: Tensor
    unshared_stamps: frozenset[int]

    def knows(self, stamps: Sequence[int]) -> bool:
        """Return whether rows are a subset of rows that shared nothing, each of a different sequence."""
        distinct = set(stamps)
        return len(distinct) == len(stamps) and self.unshared_stamps.issuperset(distinct)


class SharedDecodes:
    """Finds the shared tokens of the decodes of a cache group, and caches them for the next step."""

    def __init__(
        self, rule: SharingRule, num_kv_heads: int, num_processors: int, kernels: StepWorkKernels | None
    ) -> None:
        self._rule, self._num_kv_heads, self._num_processors = rule, num_kv_heads, num_processors
        self._kernels = kernels
        self._seen: Seen | None = None
        self.sharing = no_sharing()

    def find(
        self, positions: Tensor, firsts: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]
    ) -> bool:
        """Find the shared tokens of a step; return whether reading them once pays.

        Args:
            positions: int64 [n], position of each row in its sequence; on the host, as all arguments.
            firsts: int64 [n], first token that each row sees.
            block_ids: int64, block tables of the sequences.
            block_starts: int64 [n], offset of each row's table.
            stamps: see `StaticTokens.share`.
        """
        seen = self._seen
        # A subset of rows that shared nothing shares nothing, even if some no longer see their first token.
        if seen is not None and not seen.rows.numel() and (seen.stamps is stamps or seen.knows(stamps)):
            return False
        sees_all = firsts == 0
        if seen is None or not self._is_seen(seen, sees_all, positions, stamps):
            self._find(sees_all, positions, block_ids, block_starts, stamps)
        return len(self.sharing.rows) > 0

    def _is_seen(self, seen: Seen, sees_all: Tensor, positions: Tensor, stamps: Sequence[int]) -> bool:
        """Return whether the ranges of the last search also hold for this step."""
        if seen.stamps != stamps or not torch.equal(sees_all, seen.sees_all):
            return False
        return torch.equal(self._compared(seen.rows, seen.deciding, positions), seen.compared)

    def _compared(self, rows: Tensor, deciding: Tensor, positions: Tensor) -> Tensor:
        """Return the number of deciding units that the table of each row has, int64 [c]."""
        units = positions.index_select(0, rows).div_(self._rule.unit, rounding_mode="floor")
        return torch.minimum(units, deciding)

    def _find(
        self, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]
    ) -> None:
        """Search the ranges of a step, and keep the inputs that determine them."""
        self._seen = None  # if this fails, the next step searches again
        search = self._search_by_torch if self._kernels is None else self._search
        rows, deciding, self.sharing = search(sees_all, positions, block_ids, block_starts)
        compared = self._compared(rows, deciding, positions)
        unshared_stamps = frozenset(() if rows.numel() else stamps)
        self._seen = Seen(stamps, sees_all, rows, deciding, compared, unshared_stamps)

    def _search(
        self, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor
    ) -> tuple[Tensor, Tensor, DecodeSharing]:
        """Return the candidates, int64 [c], the number of deciding units of each, int64 [c], and the shared tokens."""
        assert self._kernels is not None
        num_rows = positions.numel()
        most = MostShared.of(num_rows, self._rule.tile_rows, self._num_kv_heads, self._num_processors)
        by_row = torch.empty(5, num_rows, dtype=torch.int64)
        items = torch.empty(most.num_items, SHARED_ITEM, dtype=torch.int32)
        members = torch.empty(most.num_rows, SHARED_ROW, dtype=torch.int32)
        item_rows, member_rows = (torch.empty(len(table), dtype=torch.int64) for table in (items, members))
        call = FoundSharingCall(
            most.num_items,
            most.num_rows,
            *(tensor.data_ptr() for tensor in (*by_row, items, item_rows, members, member_rows)),
        )
        pointers = (tensor.data_ptr() for tensor in (positions, sees_all, block_starts, block_ids))
        rule = sharing_call(self._rule, self._num_kv_heads, self._num_processors)
        has_room = self._kernels.share(SharedDecodeRowsCall(num_rows, *pointers), rule, ctypes.byref(call))
        assert has_room, f"more is shared than there is room for: {most}"
        candidates, deciding = by_row[:2, : call.num_candidates]
        if not call.num_sharing:
            return candidates, deciding, no_sharing()
        rows, ends, num_parts = by_row[2:, : call.num_sharing]
        shared, of_shared = slice(call.num_items), slice(call.num_members)
        sharing = DecodeSharing(
            *(rows, ends, num_parts, items[shared], item_rows[shared]), members[of_shared], member_rows[of_shared]
        )
        return candidates, deciding, sharing

    def _search_by_torch(
        self, sees_all: Tensor, positions: Tensor, block_ids: Tensor, block_starts: Tensor
    ) -> tuple[Tensor, Tensor, DecodeSharing]:
        # Only rows whose first block occurs more than once are candidates.
        heads = block_ids.index_select(0, block_starts).tolist()
        counts = Counter(heads)
        of_all = zip(heads, sees_all.tolist(), block_starts.tolist(), positions.tolist(), strict=True)
        candidates = [
            PrefixCandidate(row, 1, table, position)
            for row, (head, sees, table, position) in enumerate(of_all)
            if sees and counts[head] > 1
        ]
        result = find_shared(candidates, block_ids, self._rule)
        sharing = no_sharing()
        if result.ranges:
            shared = Sharing.of(result.ranges, self._rule, self._num_kv_heads, self._num_processors)
            sharing = DecodeSharing.of(shared)
        rows = vector([candidate.first_row for candidate in candidates])
        return rows, vector(result.deciding) // self._rule.unit, sharing
