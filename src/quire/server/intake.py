"""What is decided before a request's body is read: whether there is a place for it, and memory for the body."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.bounded.process import MANY_BYTES
from quire.server.body import MAX_LONG_BODIES
from quire.server.errors import unavailable
from quire.server.state import ServerState

# Requests to these take a place in the queue.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
# Bytes of a body that are not counted: a connection reads as many ahead, and most bodies have no more.
FREE_BYTES = 64 << 10


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
        # Those that are counted and not complete yet; the one of which nothing has come for the longest time first.
        self._uploads: dict[Upload, None] = {}
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through.

        Raises:
            QueueFull: no place is left; the body was not read.
        """
        # Reading, parsing and checking a body only to refuse it would cost more than the answer.
        if scope["path"] in GENERATING and scope["method"] == "POST" and not self._state.is_draining:
            self._state.llm.check_room()
        upload = Upload()

        async def receive_counted() -> Message:
            message = await upload.receive(receive)
            if message.get("more_body"):
                self._count(upload, len(message.get("body", b"")))
            else:
                self._discard(upload)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._discard(upload)
            if upload.num_bytes > MANY_BYTES:  # now the body, and what was made of it, is mostly gone
                self._state.bodies.give_back_soon()

    def _count(self, upload: Upload, num_bytes: int) -> None:
        """Count bytes of an upload; those that would exceed the limit end the upload that stands still the longest."""
        before, upload.num_bytes = upload.num_bytes, upload.num_bytes + num_bytes
        if upload.num_bytes <= FREE_BYTES:
            return
        self._num_bytes += upload.num_bytes - max(before, FREE_BYTES)
        self._uploads.pop(upload, None)
        self._uploads[upload] = None
        while self._num_bytes > self._limit:
            stillest = next(iter(self._uploads))
            self._discard(stillest)
            stillest.end()

    def _discard(self, upload: Upload) -> None:
        if upload in self._uploads:
            del self._uploads[upload]
            self._num_bytes -= upload.num_bytes - FREE_BYTES


class Upload:
    """A request's body on its way."""

    def __init__(self) -> None:
        # That have come.
        self.num_bytes = 0
        self._is_ended = False
        # Of what is waited for now.
        self._timeout: asyncio.Timeout | None = None

    async def receive(self, receive: Receive) -> Message:
        """Return the next message.

        Raises:
            ApiError: 503, the upload was ended.
        """
        message: Message = {}
        if not self._is_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._timeout:
                    message = await receive()
            self._timeout = None
        if self._is_ended:
            raise unavailable("too many long bodies are on their way", "too_many_uploads")
        return message

    def end(self) -> None:
        """Have what waits for the rest fail."""
        self._is_ended = True
        if self._timeout is not None:
            self._timeout.reschedule(0)
