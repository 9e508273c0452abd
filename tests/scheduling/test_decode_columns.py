"""Items and results in columns are those of tuples, for whoever looks at one of them."""

from __future__ import annotations

from quire.memory.results import TableDelta
from quire.scheduling.decode_columns import DecodeItems, DecodeResults
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN


def test_items_are_those_of_a_tuple() -> None:
    delta = TableDelta(0, 3, (8,))
    items = DecodeItems([5, 2, 7], [10, 48, 3], [(), (delta,), ()])
    expected = tuple(
        ScheduledSequence(seq_id, start, (UNKNOWN,), deltas, 1, None)
        for seq_id, start, deltas in ((5, 10, ()), (2, 48, (delta,)), (7, 3, ()))
    )
    assert tuple(items) == expected
    assert items == expected
    assert expected == items
    assert items == DecodeItems([5, 2, 7], [10, 48, 3], [(), (delta,), ()])
    assert items != DecodeItems([5, 2, 7], [10, 48, 4], [(), (delta,), ()])
    assert items != expected[1:]
    assert (len(items), items[1], items[1:]) == (3, expected[1], expected[1:])
    assert items.changed == [1]
    assert list(items.changes()) == [(2, (delta,))]


def test_results_are_those_of_a_list() -> None:
    results = DecodeResults([5, 2, 7], [30, 31, 32])
    expected = [ItemResult(5, (30,)), ItemResult(2, (31,)), ItemResult(7, (32,))]
    assert list(results) == expected
    assert (len(results), results[2], results[-1], results[:2]) == (3, expected[2], expected[2], expected[:2])
