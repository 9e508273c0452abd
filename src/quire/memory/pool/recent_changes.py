"""The blocks of a pool that were copied, merged or evicted of late, recorded only while somebody reads them."""

from __future__ import annotations

from collections import deque

MAX_RECENT = 256


class RecentChanges:
    """The latest changes of one pool, at most `MAX_RECENT` of each kind.

    Attributes:
        copied: blocks that were the targets of copies on write.
        merged: published blocks that took the place of a duplicate.
        evicted: blocks that were evicted.
    """

    __slots__ = ("copied", "evicted", "merged")

    def __init__(self) -> None:
        self.copied: deque[int] = deque(maxlen=MAX_RECENT)
        self.merged: deque[int] = deque(maxlen=MAX_RECENT)
        self.evicted: deque[int] = deque(maxlen=MAX_RECENT)
