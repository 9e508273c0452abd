"""What is decided before a request's body is read: whether there is a place for it, and memory for the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import unavailable
from quire.server.state import ServerState

# Requests to these take a place in the queue.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
# Bodies of the longest kind that may be on their way at a time.
MAX_LONG_BODIES = 32


class Intake:
    """Stands between the guard and the routes; ASGI middleware.

    Args:
        app: the routes.
        state: of the server.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._limit = MAX_LONG_BODIES * state.config.max_body_bytes
        # Of bodies that are not complete yet.
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through.

        Raises:
            QueueFull: no place is left; the body was not read.
        """
        # Reading, parsing and checking a body only to refuse it would cost more than the answer.
        if scope["path"] in GENERATING and scope["method"] == "POST" and not self._state.is_draining:
            self._state.llm.check_room()
        num_held = 0

        async def receive_counted() -> Message:
            nonlocal num_held
            message = await receive()
            if message["type"] == "http.request":
                change = len(message.get("body", b"")) if message.get("more_body") else -num_held
                if change > 0 and self._num_bytes + change > self._limit:
                    raise unavailable("too many long bodies are on their way", "too_many_uploads")
                num_held += change
                self._num_bytes += change
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._num_bytes -= num_held
