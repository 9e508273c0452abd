"""Messages between the ingress and a replica of the engine, and a request's ticket for the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quire.fleet.routing.router import Route, RouteRequest

RawHeaders = tuple[tuple[bytes, bytes], ...]


class TicketCounter(Protocol):
    """Counter of tickets; see `fleet.ReplicaFleet`."""

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the event loop of the router."""

    def on_first_token(self, ticket: Ticket, now_s: float | None = None) -> None:
        """Record that a stream has begun."""

    def end(self, ticket: Ticket) -> None:
        """Record that an attempt has ended, complete or not."""


class Ticket:
    """One attempt to have a request answered. It stays in the process of the ingress, with the handle's router.

    The ingress and the router run on different event loops, and each writes its own attributes.
    """

    __slots__ = (
        "begun",
        "counted",
        "fleet",
        "is_ended",
        "is_pinned",
        "num_hit",
        "replica",
        "request",
        "routed_s",
        "routes",
        "tried",
    )

    def __init__(
        self, request: RouteRequest | None = None, tried: tuple[str, ...] = (), *, is_pinned: bool = False
    ) -> None:
        self.request = request
        self.tried = tried
        self.is_pinned = is_pinned
        self.replica: str | None = None
        self.routed_s = 0.0
        self.num_hit = 0
        self.fleet: TicketCounter | None = None
        self.routes: dict[str, Route] = {}
        self.counted: str | None = None
        self.begun: Route | None = None
        self.is_ended = False

    def begin_stream(self) -> None:
        """Tell the router that the answer has begun; any thread may call this."""
        if self.fleet is not None:
            self.fleet.soon(self.fleet.on_first_token, self)

    def end(self) -> None:
        """Tell the router that the attempt has ended; any thread may call this."""
        self.is_ended = True
        if self.fleet is not None:
            self.fleet.soon(self.fleet.end, self)


class RoutedCall:
    """A request on its way to a replica. Its ticket is not sent with it."""

    __slots__ = ("body", "headers", "method", "target", "ticket")

    def __init__(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes, ticket: Ticket | None = None
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.ticket = ticket

    @property
    def prompt(self) -> str:
        """The prompt for routers of texts, such as Ray's `PrefixCacheAffinityRouter`: one character a token."""
        request = None if self.ticket is None else self.ticket.request
        token_ids = () if request is None else request.token_ids
        # Surrogates are not characters.
        return "".join(chr(token if token < 0xD800 else token + 0x800) for token in token_ids) or " "

    def __reduce__(self) -> tuple[type[RoutedCall], tuple[str, bytes, RawHeaders, bytes]]:
        return RoutedCall, (self.method, self.target, self.headers, self.body)


class AnswerHead(NamedTuple):
    """The first item of an answer; the parts of its body follow.

    Args:
        status: status.
        headers: headers, with names in lower case.
        replica: name of the replica.
    """

    status: int
    headers: RawHeaders
    replica: str


class WholeAnswer(NamedTuple):
    """An answer in one piece.

    Args:
        head: status, headers and replica.
        body: body.
    """

    head: AnswerHead
    body: bytes
