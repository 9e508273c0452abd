"""Items and results of steps that only decode, in columns.

A step of many sequences that decode has hundreds of items that differ in two numbers, and as many results of one token.
What is done for all of them takes a column, and makes no item: that is most of a host's work beside a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, compress, count, repeat
from typing import Final, overload

from quire.decoding.drafting import UNKNOWN
from quire.memory.results import TableDelta
from quire.scheduling.plan import ItemResult, ScheduledSequence

# The tokens of an item whose token the step before draws.
_PLACEHOLDER: Final = (UNKNOWN,)


class DecodeItems(Seq[ScheduledSequence]):
    """Items of a plan that was made ahead and only decodes, in columns; the items are made where they are asked for.

    Each is one token, drawn by the step before, of a sequence that the data plane knows. While `seq_ids` is the same
    object as in the plan before, so are the sequences.

    Args:
        seq_ids: id of each sequence, in a list that nobody changes.
        starts: `start` of each item.
        deltas: `table_deltas` of each item.

    Attributes:
        changed: indices of the items with changes of block tables, rising.
    """

    __slots__ = ("_deltas", "_items", "changed", "seq_ids", "starts")

    def __init__(self, seq_ids: list[int], starts: list[int], deltas: Seq[tuple[TableDelta, ...]]) -> None:
        self.seq_ids, self.starts, self._deltas = seq_ids, starts, deltas
        self.changed = list(compress(count(), deltas))
        self._items: tuple[ScheduledSequence, ...] | None = None

    @property
    def items(self) -> tuple[ScheduledSequence, ...]:
        """The items."""
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
        """Yield the sequences whose block tables change, with the changes."""
        for idx in self.changed:
            yield self.seq_ids[idx], self._deltas[idx]


class DecodeResults(Seq[ItemResult]):
    """Results that have one token each and nothing else, in columns; an `ItemResult` is made where it is asked for.

    Args:
        seq_ids: id of each sequence.
        token_ids: its token.
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
    """Return the id of each item's sequence: of `DecodeItems`, the list itself."""
    return items.seq_ids if isinstance(items, DecodeItems) else [item.seq_id for item in items]


def row_starts_of(items: Seq[ScheduledSequence]) -> list[int]:
    """Return the first row of each item in the batch of all, and the number of rows."""
    return list(accumulate((len(item.token_ids) for item in items), initial=0))


def starts_of(items: Seq[ScheduledSequence]) -> list[int]:
    """Return the `start` of each item."""
    return items.starts if isinstance(items, DecodeItems) else [item.start for item in items]
