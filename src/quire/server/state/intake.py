"""Admission of a request before its body is read: by queue slots, and by memory for the body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.platform.bounded.process import MANY_BYTES
from quire.server.requests.body import BodyReader, max_waiting_bytes
from quire.server.requests.errors import unavailable

# Requests to these paths take a queue slot.
POOLING = (
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify"),
    *("/api/embed", "/api/embeddings"),
)
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
GENERATING = frozenset({"/v1/completions", *CHATS, *POOLING})
# Bytes of a body that are not counted: a connection reads this many ahead, and most bodies are shorter.
FREE_BYTES = 64 << 10


class Intake:
    """ASGI middleware between the guard and the application of a server or a router, which limits uploads.

    The bodies on their way have `max_waiting_bytes` together, without the first `FREE_BYTES` of each.

    Args:
        app: application after the intake.
        bodies: reader of the bodies.
        admit: function that raises if a request is refused before its body is read; its argument is ASGI's scope.
    """

    def __init__(self, app: ASGIApp, *, bodies: BodyReader, admit: Callable[[Scope], None]) -> None:
        self._app = app
        self._bodies = bodies
        self._admit = admit
        self._limit = max_waiting_bytes(bodies.max_bytes)
        # Incomplete uploads that are counted, in the order of their last bytes.
        self._uploads: dict[Upload, None] = {}
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Reading, parsing and checking the body of a refused request would cost more than the answer.
        self._admit(scope)
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
            if upload.num_bytes > MANY_BYTES:  # by now most objects of the body are freed
                self._bodies.give_back_soon()

    def _count(self, upload: Upload, num_bytes: int) -> None:
        """Count bytes of an upload; if all uploads exceed the limit, end the one that has been silent the longest."""
        before, upload.num_bytes = upload.num_bytes, upload.num_bytes + num_bytes
        if upload.num_bytes <= FREE_BYTES:
            return
        self._num_bytes += upload.num_bytes - max(before, FREE_BYTES)
        self._uploads.pop(upload, None)
        self._uploads[upload] = None
        while self._num_bytes > self._limit:
            oldest = next(iter(self._uploads))
            self._discard(oldest)
            oldest.end()

    def _discard(self, upload: Upload) -> None:
        if upload in self._uploads:
            del self._uploads[upload]
            self._num_bytes -= upload.num_bytes - FREE_BYTES


class Upload:
    """A request's body while it arrives."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_ended = False
        # Timeout of the `receive` in progress.
        self._timeout: asyncio.Timeout | None = None

    async def receive(self, receive: Receive) -> Message:
        """Return the next message."""
        message: Message = {}
        if not self._is_ended:
            try:
                async with asyncio.timeout(None) as self._timeout:
                    message = await receive()
            except TimeoutError:
                pass
            finally:
                self._timeout = None
        if self._is_ended:
            raise unavailable("too many long bodies are on their way", "too_many_uploads")
        return message

    def end(self) -> None:
        """Make the `receive` in progress fail, and every later one."""
        self._is_ended = True
        if self._timeout is not None:
            self._timeout.reschedule(0)
