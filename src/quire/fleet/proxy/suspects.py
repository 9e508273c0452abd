"""Suspects: requests that were in flight, without output, when their server was lost. One of them may be the cause.

Each is sent to one other server, one at a time in the whole fleet, so that a request that ends servers shows itself
alone. A request that was in flight at two losses is refused, and so are equal ones for a time, so it costs two servers
at most, however many there are. The others are answered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from quire.fleet.proxy.exchange import Exchange
from quire.fleet.proxy.upstream import UpstreamLate
from quire.server.requests.errors import ApiError

# Losses of a server after which a request is refused.
MAX_LOSSES: Final = 2
# Time for which requests that are equal to a refused one are refused too, and the number of refused ones that are kept.
REFUSED_S: Final = 60.0
MAX_REFUSED: Final = 4096
# A suspect has cleared itself once it has run longer than until the loss of its server, by this factor and time, but
# the others wait for it no longer than the maximum.
CLEARING_FACTOR, CLEARING_S, MAX_CLEARING_S = 1.5, 0.5, 5.0


class Suspects:
    """The suspects of a fleet.

    Attributes:
        num_suspects: requests so far that were in flight when their server was lost.
        num_refused: requests that were refused.
        num_waiting: suspects that wait for their turn.
    """

    def __init__(self) -> None:
        self.num_suspects = self.num_refused = self.num_waiting = 0
        self._turn = asyncio.Lock()
        # Time of the refusal by the digest of the request.
        self._refused: OrderedDict[bytes, float] = OrderedDict()

    def check(self, exchange: Exchange) -> None:
        """Refuse a request that is equal to one that was refused recently.

        Raises:
            ApiError: it is.
        """
        if not self._refused:
            return
        refused_s = self._refused.get(_digest(exchange))
        if refused_s is not None and asyncio.get_running_loop().time() - refused_s < REFUSED_S:
            self.num_refused += 1
            raise _refusal()

    def refuse(self, exchange: Exchange) -> ApiError:
        """Return the error of a request that was in flight at too many losses, and remember the request."""
        digest = _digest(exchange)
        self._refused[digest] = asyncio.get_running_loop().time()
        self._refused.move_to_end(digest)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        self.num_refused += 1
        return _refusal()

    async def wait_for_turn(self, exchange: Exchange, age_s: float, limit_s: float | None) -> Turn | None:
        """Wait until a suspect may be sent to another server; return None if its client leaves first.

        Args:
            exchange: the request.
            age_s: seconds from its start until the loss of its server.
            limit_s: maximum time to wait.

        Raises:
            ApiError: an equal request was refused in the meantime, or its turn does not come in time.
        """
        self.num_suspects += 1
        self.num_waiting += 1
        try:
            turn: Turn | None = await exchange.unless_left(self._acquire(age_s), limit_s)
        except UpstreamLate as error:
            raise exchange.late() from error
        finally:
            self.num_waiting -= 1
        if turn is None:
            return None
        try:
            self.check(exchange)
        except ApiError:
            turn.end()
            raise
        return turn

    async def _acquire(self, age_s: float) -> Turn:
        await self._turn.acquire()
        return Turn(self._turn, min(age_s * CLEARING_FACTOR + CLEARING_S, MAX_CLEARING_S))


class Turn:
    """The turn of one suspect, which ends with its answer's first byte, its end, or when it has cleared itself."""

    def __init__(self, lock: asyncio.Lock, limit_s: float) -> None:
        self._lock: asyncio.Lock | None = lock
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.end)

    def end(self) -> None:
        """Give the turn to the next suspect; further calls do nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            self._timer.cancel()


def _digest(exchange: Exchange) -> bytes:
    return blake2b(exchange.path.encode() + b"\0" + exchange.body, digest_size=16).digest()


def _refusal() -> ApiError:
    return ApiError(
        500,
        f"{MAX_LOSSES} servers were lost while they had this request, so it is not sent to another one",
        code="request_loses_servers",
        headers={"x-should-retry": "false"},
    )
