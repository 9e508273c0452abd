"""One queue for everything that can happen to an HTTP request while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from starlette.types import Receive

from quire.engine.outputs import RequestOutput

# Which prompt, and what is new of it.
News = tuple[int, RequestOutput]


class ClientGone(Exception):
    """The client has closed the connection; nobody reads an answer."""


class Feed:
    """Merges the outputs of a request's prompts with the client's leaving and the server's stopping.

    Args:
        idle_s: silence after which `follow` says so.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        # None: one of the streams has ended.
        self._queue: asyncio.Queue[News | Exception | None] = asyncio.Queue()

    def fail(self, error: Exception) -> None:
        """End the request with an error, from outside."""
        self._queue.put_nowait(error)

    async def follow(
        self, streams: Sequence[AsyncIterator[RequestOutput]], receive: Receive
    ) -> AsyncGenerator[list[News], None]:
        """Yield all news that are there, as soon as there are any; an empty list after a silence.

        Whatever ends it (the last output, an error, the client, the caller), every stream has been closed, and with it
        the engine's request, when it is over.

        Args:
            streams: one for each prompt.
            receive: ASGI's; the request's body was read from it before.

        Raises:
            ClientGone: the connection was closed.
            Exception: what a stream raised, or `fail` was given.
        """
        tasks = [asyncio.create_task(self._pump(idx, stream)) for idx, stream in enumerate(streams)]
        tasks.append(asyncio.create_task(self._watch(receive)))
        num_left = len(streams)
        try:
            while num_left:
                try:
                    async with asyncio.timeout(self._idle_s):
                        happened = [await self._queue.get()]
                except TimeoutError:
                    yield []
                    continue
                while not self._queue.empty():
                    happened.append(self._queue.get_nowait())
                errors = [item for item in happened if isinstance(item, Exception)]
                news = [item for item in happened if isinstance(item, tuple)]
                num_left -= happened.count(None)
                if news:
                    yield news
                if errors:
                    raise errors[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, idx: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], stream)) as outputs:
                async for output in outputs:
                    self._queue.put_nowait((idx, output))
        except Exception as error:
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(ClientGone())
