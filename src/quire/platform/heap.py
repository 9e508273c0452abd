"""Exclusion of existing objects from passes of the cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap(*, is_wanted: bool) -> Iterator[None]:
    """Exclude existing objects from the collector's passes within a block, unless the process has frozen objects.

    Existing objects that become garbage within the block are collected after it.

    Args:
        is_wanted: False to do nothing. If True, the frozen objects of the process are counted first, which takes
            milliseconds if there are any.
    """
    is_ours = is_wanted and not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
