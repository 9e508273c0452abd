"""A mailbox for the unread deltas of one request, between the engine and the task that reads them."""

from __future__ import annotations

import asyncio

from quire.engine.outputs.outputs import RequestOutput

# Item of a request's stream: a delta of its output, or the error that ends it.
Item = RequestOutput | Exception


class OutputMailbox:
    """The unread deltas of one request, for one reading task; used on its event loop only.

    Deltas that were not read yet are merged, so a slow reader holds at most one output.
    """

    __slots__ = ("_delta", "_error", "_has_item")

    def __init__(self) -> None:
        self._delta: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_item = asyncio.Event()

    async def next(self) -> RequestOutput:
        """Wait for the next delta and return it."""
        await self._has_item.wait()
        delta, self._delta = self._delta, None
        if delta is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_item.clear()
        return delta

    def put(self, item: Item) -> None:
        """Add an item."""
        if isinstance(item, Exception):
            self._error = item
        elif self._delta is None:
            self._delta = item
        else:
            self._delta.add(item)
        self._has_item.set()
