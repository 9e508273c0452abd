"""Simulations without Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector in a block.

    A simulation leaves no cycles of objects behind, since ended requests are taken apart. But the number of its objects
    grows to millions, and the collector would visit all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
