"""The idle queue, against an ordered dictionary."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from itertools import compress

import pytest

from quire.memory.pool import idle_queue as idle_queue_module
from quire.memory.pool.idle_queue import IdleQueue, Ticker


@pytest.mark.parametrize("seed", range(20))
def test_it_is_an_ordered_dictionary_of_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_queue_module, "MOST_STALE", seed)
    rng, clock = random.Random(seed), Ticker()
    queue, twin = IdleQueue(clock), OrderedDict[int, int]()
    for _ in range(400):
        if rng.random() < 0.5:
            coming = [number for number in rng.sample(range(60), rng.randrange(20)) if number not in twin]
            if rng.random() < 0.5:
                twin.update((number, clock.now + idx) for idx, number in enumerate(coming))
                queue.add(coming)
            else:
                # In turn with another queue.
                moments = clock.ticks(2 * len(coming))[rng.randrange(2) :: 2]
                twin.update(zip(coming, moments, strict=True))
                queue.add(coming, moments)
        else:
            # Whole batches and parts of them, and some that are not there or never were.
            most = rng.randrange(1, 25)
            leaving = list(twin)[:most] if rng.random() < 0.5 else rng.sample(range(90), most)
            assert queue.discard(leaving) == len(twin.keys() & {*leaving})
            for number in leaving:
                twin.pop(number, None)
        if rng.random() < 0.2:
            clock.ticks(rng.randrange(5))  # for another queue
        assert list(queue.items()) == list(twin.items())
        assert (list(queue), len(queue)) == (list(twin), len(twin))
        assert [number in queue for number in range(95)] == [number in twin for number in range(95)]
        most = rng.randrange(1, 70)
        assert queue.oldest(most) == list(twin)[:most]
        if twin:
            some = rng.sample(list(twin), rng.randrange(1, len(twin) + 1))
            assert queue.since(some) == [twin[number] for number in some]
            assert queue.since(queue.oldest(most)) == list(twin.values())[:most]


def test_what_left_does_not_pile_up() -> None:
    """Of each batch one stays: what is kept of the others is bounded."""
    queue = IdleQueue()
    for start in range(0, 50_000, 50):
        queue.add(range(start, start + 50))
        queue.discard(range(start + 1, start + 50))
        assert (
            sum(len(batch.numbers) for batch in queue._batches.values())
            <= 4 * len(queue) + idle_queue_module.MOST_STALE
        )
    assert len(queue) == 1000


def test_entries_that_left_are_gone_through_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """As prompts that are found again take their blocks from a large pool: checks are bounded by blocks that came."""
    num_checked, num_added = 0, 0

    def counted(numbers: Iterable[int], flags: list[bool]) -> Iterable[int]:
        nonlocal num_checked
        num_checked += len(flags)
        return compress(numbers, flags)

    monkeypatch.setattr(idle_queue_module, "compress", counted)
    queue = IdleQueue()
    held = [list(range(start, start + 64)) for start in range(0, 65_536, 64)]
    rng = random.Random(0)
    for _ in range(5):
        for numbers in held:
            queue.add(numbers)
            num_added += len(numbers)
        rng.shuffle(held)
        for numbers in held:  # all but the last blocks of each prompt
            queue.discard(numbers[:60])
        for numbers in held:
            queue.discard(numbers[60:])
    assert not queue
    # A pass forgets three quarters at least of what it goes through, numbers and moments.
    assert 0 < 3 * num_checked <= 8 * num_added
