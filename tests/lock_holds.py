"""The time for which a call keeps all other threads from running."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise


def longest_hold(call: Callable[[], object]) -> float:
    """Return the processor time of the longest part of a call in which no other Python thread could run, in seconds.

    A thread wakes up again and again; what the process computes between two of its turns is the call's. Processor time
    is compared, so that a busy machine changes little.
    """
    turns: list[float] = []
    is_over = threading.Event()

    def take_turns() -> None:
        while not is_over.is_set():
            turns.append(time.process_time())
            time.sleep(0.001)

    thread = threading.Thread(target=take_turns)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        thread.start()
        while not turns:
            time.sleep(0.001)
        call()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    turns.append(time.process_time())
    return max(after - before for before, after in pairwise(turns))
