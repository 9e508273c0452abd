"""Items and results of decode-only steps in columns (a structure of arrays).

A decode step of many sequences has hundreds of items that differ in two values, and as many results of one token. Code
that handles all of them takes a column, and creates no item: item creation would be most of the host's time per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, compress, count, repeat
from typing import Final, overload

from quire.memory.results import TableDelta
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN

# The tokens of an item whose token the previous step samples.
_PLACEHOLDER: Final = (UNKNOWN,)


class DecodeItems(Seq[ScheduledSequence]):
    """Items of a decode-only plan that was made ahead, in columns; `ScheduledSequence` items are created on demand.

    Each item is one token, sampled by the previous step, of a sequence that the data plane knows. As long as `seq_ids`
    is the same object as in the previous plan, the sequences are the same.

    Args:
        seq_ids: id of each sequence, in a list that is never changed.
        starts: `start` of each item.
        deltas: `table_deltas` of each item.

    Attributes:
        changed: indices of the items with block table changes, in rising order.
    """

    __slots__ = ("_deltas", "_items", "changed", "seq_ids", "starts")

    def __init__(self, seq_ids: list[int], starts: list[int], deltas: Seq[tuple[TableDelta, ...]]) -> None:
        self.seq_ids, self.starts, self._deltas = seq_ids, starts, deltas
        self.changed = list(compress(count(), deltas))
        self._items: tuple[ScheduledSequence, ...] | None = None

    @property
    def items(self) -> tuple[ScheduledSequence, ...]:
        """The items, created once."""
        if self._items is None:
            fixed = repeat(1), repeat(None), repeat(0)
            columns = zip(self.seq_ids, self.starts, repeat(_PLACEHOLDER), self._deltas, *fixed, strict=False)
            # The same as `ScheduledSequence._make`, without a Python call.
            self._items = tuple(map(tuple.__new__, repeat(ScheduledSequence), columns))
        return self._items

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self.items)

    @overload
    def __getitem__(self, idx: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, idx: slice) -> tuple[ScheduledSequence, ...]: ...
    def __getitem__(self, idx: int | slice) -> ScheduledSequence | tuple[ScheduledSequence, ...]:
        return self.items[idx]

    def __eq__(self, other: object) -> bool:
        return self.items == (other.items if isinstance(other, DecodeItems) else other)

    def changes(self) -> Iterator[tuple[int, tuple[TableDelta, ...]]]:
        """Yield the id of each sequence whose block tables change, with the changes."""
        for idx in self.changed:
            yield self.seq_ids[idx], self._deltas[idx]


class DecodeResults(Seq[ItemResult]):
    """Results that have one token each and nothing else, in columns; an `ItemResult` is created on demand.

    Args:
        seq_ids: id of each sequence.
        token_ids: token of each sequence.
    """

    __slots__ = ("seq_ids", "token_ids")

    def __init__(self, seq_ids: Seq[int], token_ids: list[int]) -> None:
        self.seq_ids, self.token_ids = seq_ids, token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[ItemResult]:
        return map(ItemResult, self.seq_ids, zip(self.token_ids, strict=True))

    @overload
    def __getitem__(self, idx: int) -> ItemResult: ...
    @overload
    def __getitem__(self, idx: slice) -> list[ItemResult]: ...
    def __getitem__(self, idx: int | slice) -> ItemResult | list[ItemResult]:
        if isinstance(idx, slice):
            return list(self)[idx]
        return ItemResult(self.seq_ids[idx], (self.token_ids[idx],))


def seq_ids_of(items: Seq[ScheduledSequence]) -> list[int]:
    """Return the id of each item's sequence; for `DecodeItems`, the list itself, not a copy."""
    return items.seq_ids if isinstance(items, DecodeItems) else [item.seq_id for item in items]


def row_starts_of(items: Seq[ScheduledSequence]) -> list[int]:
    """Return the first row of each item in the flattened batch, and last the number of rows."""
    return list(accumulate((len(item.token_ids) for item in items), initial=0))


def starts_of(items: Seq[ScheduledSequence]) -> list[int]:
    """Return the `start` of each item."""
    return items.starts if isinstance(items, DecodeItems) else [item.start for item in items]
