"""A queue of IDs in the order in which they became idle: blocks without holders, or slabs without used blocks.

```
 batches   | 9 8 7 6 |   5 .   | . . 2 |       IDs that were added together; removed ones are skipped
```

IDs are added in batches, as a sequence releases its blocks, and mostly removed in batches. So a batch is a list, and an
ID only has the name of its batch: that costs a tenth of a dictionary's entry. IDs are `numbers` in this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress

# Entries of removed IDs are swept above this number of entries, in addition to four for each ID in the queue.
MOST_STALE = 4096


class Ticker:
    """A logical clock: each tick is greater than all before. Ticks of queues that share it can be compared."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def ticks(self, count: int) -> range:
        """Return the next `count` ticks."""
        start = self.now
        self.now += count
        return range(start, self.now)


class _Batch:
    """IDs that were added together, and their ticks; `num_left` of them are still in the queue."""

    __slots__ = ("moments", "num_left", "numbers")

    def __init__(self, numbers: list[int], moments: Sequence[int]) -> None:
        self.numbers = numbers
        self.moments = moments
        self.num_left = len(numbers)


class IdleQueue:
    """IDs of idle blocks or slabs, each with the tick at which it became idle.

    IDs are small: they index a list.
    """

    __slots__ = ("_batch_of", "_batches", "_clock", "_count", "_num_listed")

    def __init__(self, clock: Ticker | None = None) -> None:
        self._clock = clock or Ticker()
        # By ID: the name of its batch, 0 if it is not in the queue.
        self._batch_of: list[int] = []
        # By name, the oldest first. The name is the first tick plus 1.
        self._batches: dict[int, _Batch] = {}
        self._count = 0
        self._num_listed = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return number < len(self._batch_of) and self._batch_of[number] > 0

    def __iter__(self) -> Iterator[int]:
        return (number for number, _ in self.items())

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield each ID and its tick, the oldest first."""
        batch_of = self._batch_of
        for name, batch in self._batches.items():
            for number, moment in zip(batch.numbers, batch.moments, strict=True):
                if batch_of[number] == name:
                    yield number, moment

    def add(self, numbers: Sequence[int], moments: Sequence[int] | None = None) -> None:
        """Add distinct IDs that are not in the queue, one after the other."""
        if not numbers:
            return
        if moments is None:
            moments = self._clock.ticks(len(numbers))
        name, batch_of = moments[0] + 1, self._batch_of
        try:
            for number in numbers:
                batch_of[number] = name
        except IndexError:
            # At first IDs are added in rising order: the list doubles, so that this is rare.
            batch_of += [0] * (max(max(numbers) + 1, 2 * len(batch_of)) - len(batch_of))
            for number in numbers:
                batch_of[number] = name
        self._batches[name] = _Batch(list(numbers), moments)
        self._count += len(numbers)
        self._num_listed += len(numbers)

    def discard(self, numbers: Sequence[int]) -> int:
        """Remove IDs, ignoring IDs that are not in the queue; return the number of removed ones."""
        batch_of, batches = self._batch_of, self._batches
        try:
            names = [batch_of[number] for number in numbers]
        except IndexError:  # an ID that was never added
            names = [0]
        if 0 in names:
            numbers = [number for number in numbers if number in self]
            names = [batch_of[number] for number in numbers]
        if not names:
            return 0
        for number in numbers:
            batch_of[number] = 0
        self._count -= len(numbers)
        is_one = names.count(names[0]) == len(names)
        for name, count in ((names[0], len(names)),) if is_one else Counter(names).items():
            batch = batches[name]
            batch.num_left -= count
            if not batch.num_left:
                self._num_listed -= len(batch.numbers)
                del batches[name]
        if self._num_listed > 4 * self._count + MOST_STALE:
            self._sweep()
        return len(numbers)

    def members(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the IDs that are in the queue, in their order."""
        batch_of = self._batch_of
        try:
            names = [batch_of[number] for number in numbers]
        except IndexError:  # an ID that was never added
            return [number for number in numbers if number in self]
        num_others = names.count(0)
        if num_others in (0, len(names)):
            return () if num_others else numbers
        return [number for number, name in zip(numbers, names, strict=True) if name]

    def oldest(self, most: int) -> list[int]:
        """Return the oldest IDs, at most `most`."""
        return [number for numbers, _ in self._first(most) for number in numbers]

    def oldest_moments(self, most: int) -> list[int]:
        """Return the ticks of the IDs that `oldest` returns."""
        return [moment for _, moments in self._first(most) for moment in moments]

    def since(self, numbers: list[int]) -> list[int]:
        """Return the ticks of at least one ID, all in the queue."""
        batch_of, batches = self._batch_of, self._batches
        names = [batch_of[number] for number in numbers]
        if names.count(names[0]) == len(names):
            batch = batches[names[0]]
            start = batch.numbers.index(numbers[0])
            if batch.numbers[start : start + len(numbers)] == numbers:
                return list(batch.moments[start : start + len(numbers)])
        moments_by_name = {
            name: dict(zip(batches[name].numbers, batches[name].moments, strict=True)) for name in {*names}
        }
        return [moments_by_name[name][number] for name, number in zip(names, numbers, strict=True)]

    def _first(self, most: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the oldest IDs and their ticks, batch by batch, at most `most` IDs."""
        batch_of = self._batch_of
        for name, batch in self._batches.items():
            if most <= 0:
                return
            if batch.num_left < len(batch.numbers):
                # The entries of this batch are evicted next, so its stale entries are dropped all at once.
                is_left = [batch_of[number] == name for number in batch.numbers]
                self._num_listed -= len(is_left) - batch.num_left
                batch.numbers = list(compress(batch.numbers, is_left))
                batch.moments = list(compress(batch.moments, is_left))
            numbers, moments = batch.numbers, batch.moments
            if len(numbers) > most:
                numbers, moments = numbers[:most], moments[:most]
            most -= len(numbers)
            yield numbers, moments

    def _sweep(self) -> None:
        """Drop the entries of removed IDs."""
        for name, batch in self._batches.items():
            if batch.num_left < len(batch.numbers):
                is_left = [self._batch_of[number] == name for number in batch.numbers]
                batch.numbers = list(compress(batch.numbers, is_left))
                batch.moments = list(compress(batch.moments, is_left))
        self._num_listed = self._count
