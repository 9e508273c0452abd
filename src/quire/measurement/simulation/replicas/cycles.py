"""Simulations without Python's collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Have the process collect no cycles of objects meanwhile.

    The objects of a simulation are in no cycles once they have served: a request that has ended is taken apart. But
    their number grows to millions, and the collector would go through all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
