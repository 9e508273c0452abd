"""The time for which a call keeps all other threads from running."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise


class Holds:
    """What was measured.

    Attributes:
        longest_s: processor time of the longest part in which no other Python thread could run, in seconds.
    """

    longest_s = 0.0


@contextmanager
def watch_holds() -> Iterator[Holds]:
    """Measure how long the interpreter lock is held at a time, until the end of the block.

    A thread wakes up again and again; what the process computes between two of its turns is what others hold the lock
    for. Processor time is compared, so that a busy machine changes little.
    """
    turns: list[float] = []
    is_over = threading.Event()

    def take_turns() -> None:
        while not is_over.is_set():
            turns.append(time.process_time())
            time.sleep(0.001)

    thread = threading.Thread(target=take_turns)
    interval_s, holds = sys.getswitchinterval(), Holds()
    sys.setswitchinterval(0.001)
    try:
        thread.start()
        while not turns:
            time.sleep(0.001)
        yield holds
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
        turns.append(time.process_time())
        holds.longest_s = max(after - before for before, after in pairwise(turns))


def longest_hold(call: Callable[[], object]) -> float:
    """Return the processor time of the longest part of a call in which no other Python thread could run."""
    with watch_holds() as holds:
        call()
    return holds.longest_s
