"""One queue for everything that can happen to an HTTP request while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from starlette.types import Receive

from quire.engine.outputs.outputs import RequestOutput

# Which prompt, and what is new of it.
Delta = tuple[int, RequestOutput]


class ClientGone(Exception):
    """The client has closed the connection; nobody reads an answer."""


def merge(outputs: dict[int, RequestOutput], idx: int, delta: RequestOutput) -> None:
    """Add what is new of a prompt, by its number, to what is there of it."""
    if idx in outputs:
        outputs[idx].add(delta)
    else:
        outputs[idx] = delta


class StreamMerger:
    """Merges the outputs of a request's prompts with the client's leaving and the server's stopping.

    What is not taken yet is merged for each prompt: a client that reads slowly holds one output of each at most.

    Args:
        idle_s: silence after which `follow` says so.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._news: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._num_ended = 0
        self._has_happened = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """End the request with an error, from outside; the first one counts."""
        self._error = self._error or error
        self._has_happened.set()

    async def follow(
        self, streams: Sequence[AsyncIterator[RequestOutput]], receive: Receive
    ) -> AsyncGenerator[list[Delta], None]:
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
        is_over = False
        try:
            while not is_over:
                try:
                    async with asyncio.timeout(self._idle_s):
                        await self._has_happened.wait()
                except TimeoutError:
                    yield []
                    continue
                self._has_happened.clear()
                # As it is now: what happens while the news are sent is the next turn's.
                news, self._news = list(self._news.items()), {}
                error, is_over = self._error, self._num_ended == len(streams)
                if news:
                    yield news
                if error is not None:
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, idx: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(cast(AsyncGenerator[RequestOutput, None], stream)) as outputs:
                async for output in outputs:
                    merge(self._news, idx, output)
                    self._has_happened.set()
        except Exception as error:
            self.fail(error)
        else:
            self._num_ended += 1
            self._has_happened.set()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())
