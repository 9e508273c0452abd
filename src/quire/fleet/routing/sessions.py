"""Sessions: the replica of each conversation's last prompt, which is expected to be cached there."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple


class Visit(NamedTuple):
    """The last request of a session.

    Args:
        replica: number of its replica.
        num_bytes: length of its encoded prompt.
        digest: digest of its scope and its encoded prompt.
        at_s: time at which it was routed.
    """

    replica: int
    num_bytes: int
    digest: bytes
    at_s: float


class Sessions:
    """The last requests of the most recent sessions."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._visits: OrderedDict[str, Visit] = OrderedDict()

    def find(self, session: str, scope: tuple[str | None, ...], token_bytes: bytes) -> Visit | None:
        """Return the last request of a session if a prompt begins with the request's whole prompt, else None."""
        visit = self._visits.get(session)
        if visit is None or visit.num_bytes > len(token_bytes):
            return None
        return visit if _digest(scope, token_bytes[: visit.num_bytes]) == visit.digest else None

    def record(
        self, session: str, replica: int, scope: tuple[str | None, ...], token_bytes: bytes, now_s: float
    ) -> None:
        """Record the replica of a session's request."""
        self._visits[session] = Visit(replica, len(token_bytes), _digest(scope, token_bytes), now_s)
        self._visits.move_to_end(session)
        if len(self._visits) > self._limit:
            self._visits.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget all sessions whose last request was sent to a replica."""
        for session in [session for session, visit in self._visits.items() if visit.replica == replica]:
            del self._visits[session]


def _digest(scope: tuple[str | None, ...], token_bytes: bytes) -> bytes:
    hasher = blake2b(repr(scope).encode("utf-8", "surrogatepass"), digest_size=16)
    hasher.update(token_bytes)
    return hasher.digest()
