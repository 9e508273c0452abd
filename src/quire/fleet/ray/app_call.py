"""Run of a server's application on a request that arrived over a handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from quire.errors import WorkerError
from quire.fleet.ray.call import AnswerHead, RoutedCall

# Number of unsent parts of an answer at which the application waits.
MAX_WAITING: Final = 64


async def run_app(app: ASGIApp, call: RoutedCall, replica: str) -> AsyncGenerator[AnswerHead | bytes, None]:
    """Run an ASGI application on a request, and yield its answer; closing the generator ends the request."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)
    has_left = asyncio.Event()
    bodies = iter((call.body,))

    async def receive() -> Message:
        for body in bodies:
            return {"type": "http.request", "body": body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(_scope_of(call), receive, messages.put)
        finally:
            with suppress(asyncio.QueueFull):  # if the reader has left; else it reads until there is room
                messages.put_nowait(None) if has_left.is_set() else await messages.put(None)

    task = asyncio.create_task(work())
    try:
        is_whole = False
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield AnswerHead(int(message["status"]), tuple(message.get("headers", ())), replica)
                continue
            parts = [message.get("body", b"")]
            is_whole = not message.get("more_body")
            while not messages.empty() and not is_whole:
                further = messages.get_nowait()
                if further is None:
                    raise WorkerError("the answer was cut off")
                parts.append(further.get("body", b""))
                is_whole = not further.get("more_body")
            if data := b"".join(parts):
                yield data
        if not is_whole:
            raise WorkerError("the answer was cut off")
    finally:
        has_left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope_of(call: RoutedCall) -> dict[str, Any]:
    raw_path, _, query = call.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": unquote(raw_path.decode("ascii", "replace")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        # The ingress has checked the client's own host.
        "headers": [(b"host", b"localhost"), *call.headers],
        "client": None,
        "server": None,
    }
