"""Requests over a deployment's handle, with the interface of requests to a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from quire.fleet.proxy.upstream import HeadedAnswer, UpstreamLost
from quire.fleet.ray.call import AnswerHead, RoutedCall, Ticket

# Time in which a replica must take a request; a replica that restarts after a crash needs a while.
ASSIGN_S: Final = 60.0
MAX_SHOWN: Final = 300


class HandleCall:
    """Sends one request to the replica that the handle's router chooses."""

    def __init__(self, handle: Any, ticket: Ticket) -> None:
        self._handle = handle
        self._ticket = ticket

    async def request(
        self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> HandleAnswer:
        """Send the request and return its answer once the head has arrived."""
        items = self._handle.answer.remote(RoutedCall(method, target, tuple(headers), body, self._ticket))
        first = asyncio.ensure_future(_next(items))
        try:
            await asyncio.wait({first}, timeout=ASSIGN_S)
            if not first.done() and self._ticket.replica is None:
                raise UpstreamLost(f"no replica has taken the request in {ASSIGN_S:g} s")
            head = await first
            if not isinstance(head, AnswerHead):
                raise UpstreamLost("the replica has sent no answer")
            # A router that does not support tickets does not set the replica.
            self._ticket.replica = head.replica
            return HandleAnswer(head, items)
        except BaseException:
            first.cancel()
            items.cancel()
            raise


class HandleAnswer(HeadedAnswer):
    """The answer to a request."""

    def __init__(self, head: AnswerHead, items: Any) -> None:
        super().__init__(head.status, list(head.headers))
        self._items: Any = items

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive."""
        while self._items is not None:
            part = await _next(self._items)
            if part is None:
                self._items = None
            else:
                yield part

    def close(self) -> None:
        """Abandon the answer, unless it was read to its end; the replica then ends the request."""
        if self._items is not None:
            self._items.cancel()
            self._items = None


async def _next(items: Any) -> Any:
    """Return the next item of a stream; None at its end."""
    try:
        return await anext(items, None)
    except Exception as error:
        raise UpstreamLost(lost_by(error)) from error


def lost_by(error: BaseException) -> str:
    """Return an error of Ray or of a replica in one line; Ray's messages include the traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # An error in a replica's own code is in the last line, the loss of a replica in the first.
    line = (lines[-1] if "Traceback" in str(error) else lines[0]) if lines else ""
    return f"{type(error).__name__}: {line.strip()}"[:MAX_SHOWN]
