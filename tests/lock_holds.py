"""The time for which a call keeps all other threads from running."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path


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
    for, less the time for which the thread waited for a core instead of the lock: on a busy machine that is longer.
    """
    turns: list[float] = []
    waits: list[float] = []
    is_over = threading.Event()

    def take_turns() -> None:
        while not is_over.is_set():
            waits.append(waited_for_a_core())
            turns.append(time.process_time())
            time.sleep(0.001)

    thread = threading.Thread(target=take_turns)
    interval_s, holds = sys.getswitchinterval(), Holds()
    # As a server does. A full pass of the collector over the objects of thousands of earlier tests holds the lock, too;
    # so does a count of the frozen ones.
    gc.collect()
    gc.freeze()
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
        waits.append(waits[-1])
        lengths = [after - before for before, after in pairwise(turns)]
        waited = [after - before for before, after in pairwise(waits)]
        holds.longest_s = max(length - wait for length, wait in zip(lengths, waited, strict=True))


def waited_for_a_core() -> float:
    """Return for how many seconds this thread has been ready to run without a core; 0 where the system does not say."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


def longest_hold(call: Callable[[], object]) -> float:
    """Return the processor time of the longest part of a call in which no other Python thread could run."""
    with watch_holds() as holds:
        call()
    return holds.longest_s
