"""The cyclic garbage collector's passes over what a process has loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap(*, is_wanted: bool) -> Iterator[None]:
    """Keep the present objects out of the collector's passes within the block, unless the process does so itself.

    What becomes garbage within the block and was there before is collected afterwards.

    Args:
        is_wanted: False to do nothing. Frozen objects of the process are counted, which takes milliseconds where there
            are any.
    """
    is_ours = is_wanted and not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
