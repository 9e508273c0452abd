"""The blocks of a pool that were copied, merged or evicted recently, recorded only while a reader wants them."""

from __future__ import annotations

from collections import deque

MAX_RECENT = 256


class RecentChanges:
    """The latest changes of one pool, at most `MAX_RECENT` of each kind.

    Attributes:
        copied: blocks that were the targets of copy-on-write copies.
        merged: published blocks that replaced a duplicate.
        evicted: blocks that were evicted.
    """

    __slots__ = ("copied", "evicted", "merged")

    def __init__(self) -> None:
        self.copied: deque[int] = deque(maxlen=MAX_RECENT)
        self.merged: deque[int] = deque(maxlen=MAX_RECENT)
        self.evicted: deque[int] = deque(maxlen=MAX_RECENT)
